"""Texts that explain to a client why a training run takes no more steps."""

from __future__ import annotations

FINISHED = "training_finished"
"""Reason for not training a group that arrives after the last step of the run."""

_EXPLANATIONS = {
    FINISHED: (
        "the run has taken its last step, and nothing more is trained. To continue the run, sync "
        "the job with a larger total_training_steps and force_restart=True. To begin a new run, "
        "set another experiment_name in the job"
    ),
}


def describe_closed_run(reason: str) -> str:
    """Return a text for the user. It says why a training run takes no more steps, and what the user
    can do.

    `reason` is the field `closed` of the server's EngineStatusReply.

    >>> describe_closed_run("training_stopped")
    'the run takes no more steps (training_stopped), and nothing is trained: its log says why'
    """
    other = f"the run takes no more steps ({reason}), and nothing is trained: its log says why"
    return _EXPLANATIONS.get(reason, other)
