"""Compute the corrected text and the value that a user's feedback gives to an answer. This module
does no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm.ledger.records import TAKEN_BACK, FeedbackRecord
from fakevllm.settlement.feedback_to_reward import content_of, value_of


def edited_text(rows: Sequence[FeedbackRecord]) -> str | None:
    """Return the user's latest corrected text of an answer. Return None if the user has corrected
    nothing, or has taken the correction back.

    `rows` is all feedback about the answer, oldest first. Later feedback without a corrected text
    does not replace an earlier corrected text.

    >>> edit = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, edited="4")
    >>> taken_back = FeedbackRecord(group_id="g", feedback_id="h", received_at=1.0)
    >>> edited_text([edit]), edited_text([edit, taken_back])
    ('4', None)
    """
    edits = (row.edited for row in reversed(_not_taken_back(rows)))
    return next((text for text in edits if text is not None), None)


def feedback_value(rows: Sequence[FeedbackRecord]) -> float | None:
    """Return the latest value of the feedback about an answer. Return None if no feedback has a
    value. Feedback that the user has replaced or taken back does not count. Feedback that the app
    has sent takes precedence over implicit feedback, which a hook derives from the user's next
    request. This also holds if the implicit feedback is later.

    `rows` is all feedback about the answer, oldest first.

    >>> up = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, thumbs="up")
    >>> feedback_value([up]), feedback_value([])
    (1.0, None)
    """
    valid = [row for row in _not_taken_back(rows) if not row.is_void]
    by_user = [_value(row) for row in valid if row.kind == "feedback"]
    by_hook = [_value(row) for row in valid if row.kind != "feedback"]
    known = (value for value in [*reversed(by_user), *reversed(by_hook)] if value is not None)
    return next(known, None)


def _not_taken_back(rows: Sequence[FeedbackRecord]) -> list[FeedbackRecord]:
    """Return the feedback that the user has not taken back. Explicit feedback without any content
    takes back all earlier explicit feedback, even if that feedback was trained already."""
    kept: list[FeedbackRecord] = []
    for row in rows:
        if row.kind == "feedback" and not content_of(row):  # it takes all earlier feedback back
            kept = [other for other in kept if other.kind != "feedback"]
        elif row.reason != TAKEN_BACK:
            kept.append(row)
    return kept


def _value(row: FeedbackRecord) -> float | None:
    """Return the value of one item of feedback. If the hook `on_feedback` has evaluated the
    feedback, return the hook's result, even if this result is None."""
    is_evaluated = row.value is not None or row.hook_hash is not None
    return row.value if is_evaluated else value_of(row.score, row.thumbs)
