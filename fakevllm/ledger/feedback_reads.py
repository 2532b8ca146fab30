"""Queries about the latest feedback and its outcome. The methods block the thread, so do not call
them on the event loop."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Engine, Select, select, text

from fakevllm.config.reward import BASELINE_WINDOW
from fakevllm.ledger.group_reads import QUESTION_CHARS
from fakevllm.ledger.records import FeedbackRecord, FeedbackState, State
from fakevllm.ledger.tables import FEEDBACK

_GROUP = f"""
    SELECT substr(question, 1, {QUESTION_CHARS}), state, reason, trained_step
    FROM group_rows WHERE group_id = ?
"""


_NUM_VALUES = """
    SELECT COUNT(*) FROM (
        SELECT 1 FROM feedback WHERE app_key IS ? AND value IS NOT NULL
        AND COALESCE(reason, '') NOT IN ('taken_back', 'replaced', 'other_arm') LIMIT ?
    )
"""

_MARKS = """
    SELECT group_id, thumbs, score, edited IS NOT NULL, comment IS NOT NULL FROM feedback
    WHERE group_id IN (SELECT group_id FROM group_rows WHERE session_id = ?)
    AND kind = 'feedback' AND COALESCE(reason, '') NOT IN ('taken_back', 'replaced')
    ORDER BY received_at DESC, feedback_id DESC LIMIT ?
"""


@dataclass(frozen=True, slots=True)
class FeedbackMark:
    """One item of feedback, without its texts.

    >>> FeedbackMark("g", "up", None, False, True).text
    'thumbs up, comment'
    """

    group_id: str
    thumbs: str | None
    score: float | None
    is_edited: bool
    has_comment: bool

    @property
    def text(self) -> str:
        """The feedback in a few words."""
        words = [
            self.thumbs and f"thumbs {self.thumbs}",
            None if self.score is None else f"score {self.score:g}",
            "corrected" if self.is_edited else None,
            "comment" if self.has_comment else None,
        ]
        return ", ".join(word for word in words if word)


@dataclass(frozen=True, slots=True)
class FeedbackOutcome:
    """One item of feedback, with the outcome of its group. The fields about the group are empty if
    the ledger does not have the group."""

    feedback: FeedbackRecord
    question: str = ""
    """The first characters of the group's question."""
    group_state: str = ""
    group_reason: str | None = None
    group_step: int | None = None
    """Step that trained the group."""
    num_values: int | None = None
    """Number of values that the API key has sent, counted up to BASELINE_WINDOW. None if the
    feedback is not in the state `waiting`."""

    @property
    def trained_step(self) -> int | None:
        """Step that trained the value of the feedback. Feedback that was added to the reward of its
        answer is trained together with the group."""
        if self.feedback.state == FeedbackState.JOINED:
            return self.group_step if self.group_state == State.TRAINED else None
        return self.feedback.trained_step


class FeedbackReads:
    """A reader of feedback from the ledger."""

    def __init__(self, read_engine: Engine) -> None:
        self._read_engine = read_engine

    def latest(self, limit: int) -> list[FeedbackOutcome]:
        """Return the latest feedback that users or apps have sent, newest first, and at most
        `limit` items."""
        query = select(FEEDBACK).where(FEEDBACK.c.kind == "feedback")
        # Rows are never deleted, so the newest rows have the highest row ids.
        return self._outcomes(query.order_by(text("feedback.rowid DESC")).limit(limit))

    def of_group(self, group_id: str, limit: int) -> list[FeedbackOutcome]:
        """Return the feedback about the answer of a group, newest first, and at most `limit`
        items."""
        query = select(FEEDBACK).where(FEEDBACK.c.group_id == group_id)
        return self._outcomes(query.order_by(FEEDBACK.c.received_at.desc()).limit(limit))

    def marks_of_session(self, session_id: str, limit: int) -> list[FeedbackMark]:
        """Return the feedback that users or apps have sent about the answers of a session, oldest
        first. If there are more than `limit` items, return the latest ones. Feedback that was taken
        back or replaced is left out."""
        with self._read_engine.connect() as db:
            rows = reversed(db.exec_driver_sql(_MARKS, (session_id, limit)).all())
            return [
                FeedbackMark(row[0], row[1], row[2], bool(row[3]), bool(row[4])) for row in rows
            ]

    def num_values(self, app_key: str | None) -> int:
        """Return the number of feedback values that an API key has sent and that count in its
        baseline. The number is at most BASELINE_WINDOW, so that the query is fast."""
        with self._read_engine.connect() as db:
            return _num_values(db, app_key)

    def _outcomes(self, query: Select[Any]) -> list[FeedbackOutcome]:
        with self._read_engine.connect() as db:
            rows = [FeedbackRecord(**row) for row in db.execute(query).mappings()]
            groups = {
                row.group_id: db.exec_driver_sql(_GROUP, (row.group_id,)).one_or_none()
                for row in rows
            }
            waiting = {row.app_key for row in rows if row.state == FeedbackState.WAITING}
            nums = {app_key: _num_values(db, app_key) for app_key in waiting}
        outcomes = [FeedbackOutcome(row, *(groups[row.group_id] or ())) for row in rows]
        return [
            replace(outcome, num_values=nums[outcome.feedback.app_key])
            if outcome.feedback.state == FeedbackState.WAITING
            else outcome
            for outcome in outcomes
        ]


def _num_values(db: Connection, app_key: str | None) -> int:
    return db.exec_driver_sql(_NUM_VALUES, (app_key, BASELINE_WINDOW)).scalar_one()
