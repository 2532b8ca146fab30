"""How long a row is played again while the way to the model is cut. Pure; times are passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Patience:
    """Runs from the first cut on; waiting for room does not count.

    >>> patience = Patience(120.0)
    >>> patience.outlasts_cut(at_s=500.0), patience.outlasts_cut(at_s=621.0)
    (True, False)
    """

    limit_s: float
    _ends_at_s: float | None = None

    def outlasts_cut(self, at_s: float) -> bool:
        """Whether to play once more after a cut now."""
        if self._ends_at_s is None:
            self._ends_at_s = at_s + self.limit_s
        return at_s < self._ends_at_s

    def leave_out(self, waited_s: float) -> None:
        if self._ends_at_s is not None:
            self._ends_at_s += waited_s
