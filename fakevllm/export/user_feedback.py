"""What a user's feedback says about an answer. This module does no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm.ledger.records import FeedbackRecord
from fakevllm.settlement.feedback_to_reward import content_of, value_of


def valid_feedback(rows: Sequence[FeedbackRecord]) -> list[FeedbackRecord]:
    """Return the feedback about an answer that the user has neither replaced nor taken back.

    `rows` is all feedback about the answer, oldest first. A request to take feedback back also
    applies to feedback that was trained before, and to corrected texts.
    """
    valid: list[FeedbackRecord] = []
    for row in rows:
        if row.kind == "feedback" and not content_of(row):  # it takes all earlier feedback back
            valid = [other for other in valid if other.kind != "feedback"]
        elif not row.is_void:
            valid.append(row)
    return valid


def edited_text(valid: Sequence[FeedbackRecord]) -> str | None:
    """Return the text that the answer should have been, as the user last wrote it; None if the user
    has corrected nothing.

    >>> first = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, edited="4")
    >>> edited_text([first, FeedbackRecord(group_id="g", feedback_id="h", received_at=1.0)])
    '4'
    """
    return next((row.edited for row in reversed(valid) if row.edited is not None), None)


def feedback_value(valid: Sequence[FeedbackRecord]) -> float | None:
    """Return the value of the latest feedback that has one; None without such feedback. What the
    user sent counts before what a hook concluded from the user's next request.

    >>> up = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, thumbs="up")
    >>> feedback_value([up]), feedback_value([])
    (1.0, None)
    """
    by_user = [_value(row) for row in valid if row.kind == "feedback"]
    by_hook = [_value(row) for row in valid if row.kind != "feedback"]
    known = (value for value in [*reversed(by_user), *reversed(by_hook)] if value is not None)
    return next(known, None)


def _value(row: FeedbackRecord) -> float | None:
    """Return the value of one feedback. If the hook `on_feedback` has evaluated the feedback, the
    value is what the hook returned, even if it is None."""
    is_evaluated = row.value is not None or row.hook_hash is not None
    return row.value if is_evaluated else value_of(row.score, row.thumbs)
