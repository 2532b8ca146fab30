"""Why a run takes no more steps, in words for those who still play for it."""

from __future__ import annotations

FINISHED = "training_finished"

_WORDS = {
    FINISHED: (
        "the run has taken its last step, and nothing more is trained. A larger "
        "total_training_steps with force_restart=True goes on with it; a server with another "
        "--run-dir begins anew"
    ),
}


def why_closed(reason: str) -> str:
    """`reason`: as the engine's status tells it in `closed`.

    >>> why_closed("training_stopped")
    'the run takes no more steps (training_stopped), and nothing is trained: its log says why'
    """
    other = f"the run takes no more steps ({reason}), and nothing is trained: its log says why"
    return _WORDS.get(reason, other)
