"""The settings `[privacy]`, which say how long contents are kept. A job carries them to the
server."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class PrivacySettings(BaseModel):
    """Settings for how long contents are kept, and how much space they may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    retention_days: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Days after which the contents of a group are pruned. None means never. A group is a request
    with the answers that were sampled for it."""
    max_ledger_mb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Megabytes of the ledger's content above which the contents of the oldest groups are pruned.
    None means no limit."""
    max_journal_mb: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The same for the server's journal."""

    def union(self, other: PrivacySettings) -> PrivacySettings:
        """Return settings that prune whatever `self` or `other` prunes."""
        return PrivacySettings(
            retention_days=_smaller(self.retention_days, other.retention_days),
            max_ledger_mb=_smaller(self.max_ledger_mb, other.max_ledger_mb),
            max_journal_mb=_smaller(self.max_journal_mb, other.max_journal_mb),
        )


def _smaller(first: float | None, second: float | None) -> float | None:
    return min((one for one in (first, second) if one is not None), default=None)
