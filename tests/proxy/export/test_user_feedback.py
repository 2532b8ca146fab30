"""Values count for exports unless they were replaced or taken back, and edits unless they were
taken back."""

from __future__ import annotations

import doctest
from typing import Any

from fakevllm.export import user_feedback
from fakevllm.export.user_feedback import edited_text, feedback_value
from fakevllm.ledger.records import FeedbackRecord


def feedback(**fields: Any) -> FeedbackRecord:
    return FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, **fields)


TAKEN_BACK = feedback(reason="taken_back")


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(user_feedback)
    assert results.attempted > 0 and results.failed == 0


def test_feedback_that_was_replaced_or_taken_back_has_no_value() -> None:
    for reason in ("replaced", "taken_back"):
        assert feedback_value([feedback(thumbs="up", reason=reason)]) is None


def test_an_edit_stays_when_a_later_number_replaces_its_value() -> None:
    rows = [feedback(edited="4", thumbs="down", reason="replaced"), feedback(thumbs="up")]
    assert edited_text(rows) == "4"
    assert feedback_value(rows) == 1.0
    assert edited_text([*rows, TAKEN_BACK]) is None
    assert edited_text([feedback(edited="4", reason="taken_back")]) is None


def test_a_request_to_take_feedback_back_also_counts_if_it_is_too_late_for_training() -> None:
    trained = feedback(thumbs="up", value=1.0, state="trained")
    too_late = feedback(reason="too_late: earlier feedback counts already")
    hooks = feedback(kind="next_message", value=0.5)
    later = feedback(edited="5")
    rows = [trained, feedback(edited="4", state="kept", reason="no_number"), hooks, too_late]
    assert edited_text(rows) is None
    assert feedback_value(rows) == 0.5
    assert edited_text([*rows, later]) == "5"


def test_the_latest_correction_is_the_edited_text() -> None:
    rows = [feedback(edited="4"), feedback(edited="5"), feedback(comment="at last")]
    assert edited_text(rows) == "5"
    assert edited_text([*rows, TAKEN_BACK]) is None


def test_the_value_is_the_hooks_if_the_hook_has_evaluated_the_feedback() -> None:
    assert feedback_value([feedback(thumbs="up", value=-0.5, hook_hash="h")]) == -0.5
    assert feedback_value([feedback(thumbs="up", hook_hash="h")]) is None
    assert feedback_value([feedback(score=-0.25)]) == -0.25
    assert feedback_value([feedback(comment="hm")]) is None


def test_the_latest_value_counts_and_the_users_before_the_hooks() -> None:
    rows = [feedback(thumbs="up"), feedback(thumbs="down"), feedback(comment="why")]
    assert feedback_value(rows) == -1.0
    implicit = feedback(kind="next_message", value=0.5)
    assert feedback_value([*rows, implicit]) == -1.0
    assert feedback_value([implicit]) == 0.5
