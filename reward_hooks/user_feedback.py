"""Users are the judge: nothing but what they say of the answers they got is good or bad.

Every whole answer is worth the same until somebody says something. What is said within
`[feedback] window_s` counts in the answer's own group; what is said later, by itself. A user who
says nothing says nothing bad.
"""

from __future__ import annotations

from fakevllm.hooks.spec import Feedback, Json, Sibling

REGENERATE = -0.5
"""Another answer was asked for; None: that says nothing."""
THANKS = ("thank", "perfect", "great", "that works")
WRONG = ("that's wrong", "that is wrong", "not what i", "no, ", "try again")
NEXT_MESSAGE = 0.5
"""What a next message that begins so says, for good or bad."""
EDITED = -0.5
"""The answer had to be corrected; None: that says nothing. The correction itself is kept in the
ledger."""


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    return [0.0] * len(all_answers)


def on_feedback(feedback: Feedback) -> float | None:
    if feedback.kind == "regenerate":
        return REGENERATE
    if feedback.kind == "next_message":
        return of_next_message(feedback.next_message)
    if feedback.score is not None:
        return feedback.score
    if feedback.thumbs is not None:
        return 1.0 if feedback.thumbs == "up" else -1.0
    return EDITED if feedback.edited is not None else None


def of_next_message(text: str) -> float | None:
    """Yours to write: most of what users write next says nothing of the answer.

    >>> of_next_message("Thanks a lot!"), of_next_message("No, it is 7."), of_next_message("And 2?")
    (0.5, -0.5, None)
    """
    words = text.strip().casefold()
    if words.startswith(WRONG):
        return -NEXT_MESSAGE
    return NEXT_MESSAGE if words.startswith(THANKS) else None
