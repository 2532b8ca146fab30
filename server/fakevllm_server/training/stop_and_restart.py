"""Decide when training stops for good, and how long to wait before an engine is restarted.

The classes keep counts and do no I/O. The caller passes in metrics or the time.
"""

from __future__ import annotations

from collections.abc import Mapping

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.training.step_log import formatted

MAX_TOO_FAR = 3
"""Number of consecutive steps above `max_mismatch_k3` after which training stops. Such a step makes
no update, and its groups are lost. A single such step may be caused by a batch of unusual calls.
Several consecutive steps above the limit have a permanent cause, such as wrong weights, another
tokenizer or another temperature."""


class MismatchStop:
    """Stops training when the log-probabilities of trainer and rollout engine differ too much in
    MAX_TOO_FAR consecutive steps."""

    def __init__(self) -> None:
        self._too_far: list[int] = []
        """Consecutive steps that exceeded the limit."""
        self.reason: str | None = None
        """Reason why training has stopped; None while training continues."""

    def observe(self, step: int, metrics: Mapping[str, float], limit: float | None) -> None:
        """Count a step if the log-probabilities of trainer and rollout engine differed too much in
        this step. `limit` is the job's `max_mismatch_k3`.

        * A step within the limit resets the count to 0 if it trained tokens and made all its
          updates. Otherwise it does not change the count.
        * A step of feedback samples without groups never changes the count, because older weights
          have sampled its tokens. If `limit` is None, no step changes the count.
        * After a rollback, training repeats steps. In all cases above, `step` and the later steps
          that were counted before the rollback no longer count.
        """
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
        mismatch = formatted(metrics, "mismatch_k3", ".3g")
        self.reason = (
            f"training stopped at step {step}: trainer and engine were too far apart in "
            f"{MAX_TOO_FAR} steps in a row (mismatch_k3 {mismatch}, max_mismatch_k3 {limit:g}); "
            "serving goes on. Fix the cause (docs/engines.md), then stop the server and the proxy, "
            "and run `fakevllm-server start` and `fakevllm serve` with the same flags again"
        )


def finish_reason(job: TrainJob, last_step: int) -> str | None:
    """Return `training_finished` if the job's last step has been trained, else None. `last_step` is
    the last step that was trained."""
    limit = job.total_training_steps
    return "training_finished" if limit is not None and last_step >= limit else None


FIRST_S = 1.0
"""Seconds between a failure of the engine and the first restart."""
MAX_S = 30.0
"""Longest pause between restarts, in seconds."""
PROVEN_AFTER_S = 180.0
"""Seconds of uptime after which an engine counts as healthy. If it dies later, the cause is a new
problem, and the pauses start at FIRST_S again."""


class RestartBackoff:
    """Pauses before restarts of a failed engine. Each pause is twice the previous pause, up to
    MAX_S seconds.

    The pauses start at FIRST_S again in two cases: a training step is completed, or an engine ran
    for PROVEN_AFTER_S seconds before it failed.

    >>> backoff = RestartBackoff()
    >>> [backoff.next_pause(now) for now in (0.0, 1.0, 2.0)]
    [1.0, 2.0, 4.0]
    """

    def __init__(self) -> None:
        self._next_s = FIRST_S
        self._up_since: float | None = None

    def engine_started(self, now: float) -> None:
        """Record that an engine has started at `now`. The start alone does not shorten the pauses
        before restarts, because the engine may fail again at its first step."""
        self._up_since = now

    def reset(self) -> None:
        """Set the next pause before an engine restart to FIRST_S seconds. Call this method when a
        training step was completed."""
        self._next_s = FIRST_S

    def next_pause(self, now: float) -> float:
        """Return the pause before a failed engine is started again, in seconds. Each pause is twice
        as long as the previous one, up to MAX_S seconds."""
        if self._up_since is not None and now - self._up_since >= PROVEN_AFTER_S:
            self.reset()
        self._up_since = None
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, MAX_S)
        return pause_s
