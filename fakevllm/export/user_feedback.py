"""What a user's feedback says about an answer. This module does no I/O."""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm.ledger.records import TAKEN_BACK, FeedbackRecord
from fakevllm.settlement.feedback_to_reward import content_of, value_of


def edited_text(rows: Sequence[FeedbackRecord]) -> str | None:
    """Return the text that the answer should have been, as the user last wrote it; None if the user
    has corrected nothing, or has taken the correction back.

    `rows` is all feedback about the answer, oldest first. A later number replaces the value of
    earlier feedback, but not a corrected text.

    >>> edit = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, edited="4")
    >>> taken_back = FeedbackRecord(group_id="g", feedback_id="h", received_at=1.0)
    >>> edited_text([edit]), edited_text([edit, taken_back])
    ('4', None)
    """
    edits = (row.edited for row in reversed(_not_taken_back(rows)))
    return next((text for text in edits if text is not None), None)


def feedback_value(rows: Sequence[FeedbackRecord]) -> float | None:
    """Return the value of the latest feedback that has one, and that the user has neither replaced
    nor taken back. Return None without such feedback. A value that the user sent takes precedence
    over a value that a hook concluded from the user's next request, even if that one is later.

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
    """Leave out the feedback that the user has taken back. A request to take feedback back also
    applies to feedback that was trained before, and to corrected texts."""
    kept: list[FeedbackRecord] = []
    for row in rows:
        if row.kind == "feedback" and not content_of(row):  # it takes all earlier feedback back
            kept = [other for other in kept if other.kind != "feedback"]
        elif row.reason != TAKEN_BACK:
            kept.append(row)
    return kept


def _value(row: FeedbackRecord) -> float | None:
    """Return the value of one feedback. If the hook `on_feedback` has evaluated the feedback, the
    value is what the hook returned, even if it is None."""
    is_evaluated = row.value is not None or row.hook_hash is not None
    return row.value if is_evaluated else value_of(row.score, row.thumbs)
