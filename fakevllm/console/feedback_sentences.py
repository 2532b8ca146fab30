"""Sentences about what became of feedback. The functions do no I/O."""

from __future__ import annotations

from fakevllm.ledger.feedback_reads import FeedbackOutcome
from fakevllm.ledger.records import REPLACED, TAKEN_BACK, FeedbackRecord, FeedbackState, State

_KEPT = {
    TAKEN_BACK: "It was taken back.",
    REPLACED: "Later feedback about this answer has replaced it.",
    "not_heard": "It is stored.",
}


def value_sentence(outcome: FeedbackOutcome) -> str:
    """Return what became of the thumb or the score of feedback.

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
            return (
                "It waits until its group has reached the server, and until this API key has "
                "sent enough feedback."
            )
        case FeedbackState.POOLED:
            return "It waits for the next training step."
        case FeedbackState.LOST:
            return f"Its training was lost: {row.reason}."
        case _:
            return f"It is not trained: {row.reason}."


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
