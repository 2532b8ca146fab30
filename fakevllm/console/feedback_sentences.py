"""Sentences about what became of feedback. The functions do no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fakevllm.ledger.feedback_reads import FeedbackOutcome
from fakevllm.ledger.records import (
    REPLACED,
    TAKEN_BACK,
    FeedbackRecord,
    FeedbackState,
    GroupRecord,
    State,
)
from fakevllm.runtime.plurals import counted

_KEPT = {
    TAKEN_BACK: "It was taken back.",
    REPLACED: "Later feedback about this answer has replaced it.",
    "not_heard": "It is stored.",
}


def value_sentence(outcome: FeedbackOutcome, num_needed: int = 0) -> str:
    """Return what became of the thumb or the score of feedback. `num_needed` is the number of
    values that an API key must have before its late feedback is trained.

    >>> row = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, thumbs="up")
    >>> value_sentence(FeedbackOutcome(row))
    'It is stored, and is evaluated in a moment.'
    """
    row = outcome.feedback
    if outcome.trained_step is not None:
        return f"It was trained in step {outcome.trained_step}."
    match row.state:
        case FeedbackState.RECEIVED:
            return "It is stored, and is evaluated in a moment."
        case FeedbackState.KEPT if row.reason == "no_number":
            has_number = row.thumbs is not None or row.score is not None
            cause = "The hook gave it no value" if has_number else "It has neither thumb nor score"
            return f"{cause}, so it changes no reward."
        case FeedbackState.KEPT:
            return _KEPT.get(row.reason or "", f"It does not count: {row.reason}.")
        case FeedbackState.JOINED:
            return f"It was added to the reward of its answer. {_group_sentence(outcome)}"
        case FeedbackState.WAITING:
            num_missing = num_needed - (outcome.num_values or 0)
            if num_missing > 0:
                answers = counted(num_missing, "more answer")
                return (
                    f"It waits until its API key has sent feedback about {answers}, and until its "
                    "group has reached the server."
                )
            return "It waits until its group has reached the server."
        case FeedbackState.POOLED:
            return "It waits for the next training step."
        case FeedbackState.LOST:
            return f"Its training was lost: {row.reason}."
        case _:
            return f"It is not trained: {row.reason}."


def baseline_sentence(num_values: int, num_needed: int, *, has_key: bool) -> str:
    """Return how many thumbs are missing until those of the console's API key are trained.
    `num_values` is the number of values that the key has sent. If the console has no key, the
    values of apps without a key count, too.

    >>> baseline_sentence(5, 8, has_key=False)
    'Thumbs are trained when 8 have been sent without an API key: 3 more are missing.'
    """
    key = "with the API key of this console" if has_key else "without an API key"
    num_missing = num_needed - num_values
    if num_missing <= 0:
        trained = "further ones are trained if they differ from the earlier ones"
        return f"Enough thumbs have been sent {key}: {trained}."
    are = "1 more is" if num_missing == 1 else f"{num_missing} more are"
    return f"Thumbs are trained when {num_needed} have been sent {key}: {are} missing."


def step_sentence(engine: Mapping[str, Any] | None) -> str:
    """Return how much of the next training step has arrived. The text is empty if the server has
    not said so. `engine` is the server's status, or None.

    >>> step_sentence({"engine_status": "ENGINE.ROLLING", "global_step": 4, "backlog": 0.25})
    'Step 4 has 25 % of its groups. A thumb or a correction that is trained counts as one group.'
    """
    step, backlog = (engine or {}).get("global_step"), (engine or {}).get("backlog")
    if not isinstance(step, int) or not isinstance(backlog, int | float):
        return ""
    if (engine or {}).get("closed"):
        return ""
    share = f"{min(backlog, 1.0):.0%}".replace("%", " %")
    return (
        f"Step {step} has {share} of its groups. A thumb or a correction that is trained counts as "
        "one group."
    )


def tokens_sentence(group: GroupRecord, untrainable: Sequence[str | None]) -> str:
    """Return why feedback about an answer will not be trained, as far as its tokens show this. The
    text is empty if they can be trained, or if they have not arrived yet.

    `untrainable` has one item for each model call of the answer: the reason why the call cannot be
    trained, or None.
    """
    if group.state == State.SCORED or None in untrainable:
        return ""
    if not untrainable:
        return "Feedback about this answer is stored, and is not trained: its tokens are not kept."
    return f"Feedback about this answer is stored, and is not trained: {untrainable[0]}."


def _group_sentence(outcome: FeedbackOutcome) -> str:
    match outcome.group_state:
        case State.SCORED | State.POOLED:
            return "The group waits for a training step."
        case State.DROPPED | State.LOST:
            return f"The group is not trained: {outcome.group_reason}."
        case state:
            return f"The state of the group is {state or 'unknown'}."


def edit_sentence(row: FeedbackRecord) -> str:
    """Return what became of the corrected text of feedback, or an empty text if there is none.

    >>> row = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, edited="a better text")
    >>> edit_sentence(row)
    'The correction is stored, and is not trained: the setting feedback.edits is "keep".'
    """
    if row.edited is None:
        return ""
    match row.edit_state:
        case None:
            return (
                "The correction is stored, and is not trained: the setting feedback.edits is "
                '"keep".'
            )
        case FeedbackState.WAITING:
            return "The correction waits until its group has reached the server."
        case FeedbackState.POOLED:
            return "The correction waits for the next training step."
        case FeedbackState.TRAINED:
            return f"The correction was trained in step {row.edit_step}."
        case _:
            return f"The correction is not trained: {row.edit_reason}."
