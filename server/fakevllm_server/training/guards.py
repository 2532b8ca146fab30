"""When training stops for good: after its last step, or where steps in a row made no update.
Pure."""

from __future__ import annotations

from collections.abc import Mapping

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.training.step_log import shown

MAX_TOO_FAR = 3
"""Steps in a row. One may be a batch of odd calls and groups are gone with each; the cause of three
(other weights, another tokenizer, another temperature) does not go away by itself."""


class MismatchStop:
    def __init__(self) -> None:
        self._too_far: list[int] = []
        """Steps in a row."""
        self.reason: str | None = None
        """Why no more steps are taken; None while they are."""

    def saw(self, step: int, metrics: Mapping[str, float], limit: float | None) -> None:
        """After each step. `limit` is the job's `max_mismatch_k3`. A step that measured nothing
        says nothing, and nor does one of feedback alone, which is older than the weights; one that
        is made again counts once."""
        self._too_far = [earlier for earlier in self._too_far if earlier < step]
        is_feedback = bool(metrics.get("feedback_samples")) and not metrics.get("groups")
        if limit is None or is_feedback:
            return
        if not metrics.get("too_far"):
            if metrics.get("tokens_trained") and not metrics.get("skipped"):
                self._too_far.clear()
            return
        self._too_far.append(step)
        if len(self._too_far) < MAX_TOO_FAR:
            return
        self.reason = (
            f"training stopped at step {step}: trainer and engine were too far apart in "
            f"{MAX_TOO_FAR} steps in a row (mismatch_k3 {shown(metrics, 'mismatch_k3', '.3g')}, "
            f"max_mismatch_k3 {limit:g}); serving goes on. Mend it (docs/engines.md), then end the "
            "server and the proxy, and run `fakevllm-server start` and `fakevllm serve` with the "
            "same flags again"
        )


def finished(job: TrainJob, last_step: int) -> str | None:
    """Why no more steps will be taken once this one is made; None while they will."""
    limit = job.total_training_steps
    return "training_finished" if limit is not None and last_step >= limit else None


# How long to wait before a dead engine is started again. Pure; the clock is passed in.

FIRST_S = 1.0
MAX_S = 30.0
PROVEN_AFTER_S = 180.0
"""An engine that lived so long was well: its death is a new trouble, not the old one again."""


class RestartBackoff:
    """Pauses double while engines die young.

    >>> back_off = RestartBackoff()
    >>> [back_off.failed(now) for now in (0.0, 1.0, 2.0)]
    [1.0, 2.0, 4.0]
    """

    def __init__(self) -> None:
        self._next_s = FIRST_S
        self._up_since: float | None = None

    def booted(self, now: float) -> None:
        """Proves nothing yet: what kills it may come with the first step."""
        self._up_since = now

    def proved(self) -> None:
        """The engine did its work."""
        self._next_s = FIRST_S

    def failed(self, now: float) -> float:
        """The pause before the next start."""
        if self._up_since is not None and now - self._up_since >= PROVEN_AFTER_S:
            self.proved()
        self._up_since = None
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, MAX_S)
        return pause_s
