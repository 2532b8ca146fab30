"""Decide when the effective sample size of logged groups is too low for training to begin or to go
on. This module does no I/O."""

from __future__ import annotations

from collections.abc import Mapping

from fakevllm.errors import UserError

MAX_LOW = 3
"""Number of steps in a row below the limit after which training stops. The server makes no update
in such a step. A single one may have a batch of unusual groups."""
ADVICE = (
    "name a version that is nearer to the groups with --from, select nearer groups with --where or "
    "--last, or lower --min-ess"
)


class SampleSizeLimit:
    """Counts the consecutive steps whose effective sample size is below the limit.

    >>> SampleSizeLimit(0.5).observe(1, {"logged_ess": 0.9})
    """

    def __init__(self, min_ess: float) -> None:
        """Create the limit. `min_ess` is the lowest effective sample size that a step may have, as
        a fraction of the step's tokens."""
        self._min_ess = min_ess
        self._is_low: dict[int, bool] = {}

    def restore(self, step: int) -> None:
        """Forget the steps after `step`, which were lost in a crash."""
        self._is_low = {number: low for number, low in self._is_low.items() if number <= step}

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the effective sample size of a step. Raises UserError if step 1 is below the limit,
        or if MAX_LOW consecutive steps are below the limit. A step without logged tokens is
        ignored."""
        ess = metrics.get("logged_ess")
        if ess is None:
            return
        self._is_low[step] = ess < self._min_ess
        found = f"{ess:.3g} of their tokens, below --min-ess {self._min_ess:g}"
        if step == 1 and self._is_low[step]:
            raise UserError(
                f"Nothing was trained: the effective sample size of the first groups is {found}. "
                f"The weights are too far from those that sampled the groups: {ADVICE}."
            )
        newest = sorted(self._is_low)[-MAX_LOW:]
        if len(newest) == MAX_LOW and all(self._is_low[number] for number in newest):
            raise UserError(
                f"Training stopped at step {step}: in {MAX_LOW} steps in a row, the effective "
                f"sample size of the groups was too low (now {found}): {ADVICE}."
            )
