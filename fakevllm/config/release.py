"""The section `[release]` of fakevllm.toml. It names the rows that are held out of training, so
that versions of the weights can be measured with them."""

from __future__ import annotations

from pathlib import Path

from fakevllm.config.base import Section


class ReleaseSection(Section):
    """The section `[release]`: rows that are held out of training."""

    eval_dataset: Path | None = None
    """JSON Lines file with held-out rows. Requests that quote one of its rows are never trained.
    The text of a row is in the field that `dataset.field` names."""
