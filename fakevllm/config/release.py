"""The section `[release]` of fakevllm.toml: rows that are held out of training, with which versions
of the weights are evaluated."""

from __future__ import annotations

from pathlib import Path

from fakevllm.config.base import Section


class ReleaseSection(Section):
    """The section `[release]`: rows that are held out of training."""

    eval_dataset: Path | None = None
    """JSON Lines file with held-out rows. Requests that quote one of its rows are never trained.
    The text of a row is in the field that `dataset.field` names."""
