"""The body of a feedback request, and the rules for duplicates and for the feedback's value. This
module does no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fakevllm.config.reward import BASELINE_WINDOW
from fakevllm.ledger.records import FeedbackRecord, FeedbackState

MIN_ADVANTAGE = 1e-6
"""Smallest absolute advantage of a sample from feedback. A sample with a smaller absolute advantage
is dropped, because it would have no effect."""


class FeedbackBody(BaseModel):
    """The body of POST /v1/feedback. Unknown fields are ignored, because vLLM ignores them too."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    id: str = Field(min_length=1, max_length=300)
    """Id of the answer that the feedback is about. The app received this id with the answer."""
    score: float | None = Field(default=None, ge=-1, le=1, strict=True)
    thumbs: Literal["up", "down"] | None = None
    edited: str | None = Field(default=None, min_length=1, max_length=1_000_000)
    """Corrected text of the answer, written by the user."""
    comment: str | None = Field(default=None, min_length=1, max_length=100_000)
    feedback_id: str | None = Field(default=None, pattern="^[A-Za-z0-9_.:-]{1,100}$")
    """Idempotency key, which the app may choose."""
    any_key: bool = False
    """Whether the answer may have been given to another API key. Only an admin may set this
    field."""

    @model_validator(mode="after")
    def _has_content(self) -> FeedbackBody:
        if not self.model_fields_set & {"score", "thumbs", "edited", "comment"}:
            raise ValueError(
                "at least one of score (-1 to 1), thumbs ('up' or 'down'), edited and comment is "
                "required"
            )
        return self

    @property
    def is_withdrawal(self) -> bool:
        """True if this request takes earlier feedback back. In such a request, all content fields
        (score, thumbs, edited, comment) are null."""
        return not self.content

    @property
    def content(self) -> dict[str, Any]:
        """The content fields (score, thumbs, edited, comment) that are not null."""
        return self.model_dump(exclude={"id", "feedback_id", "any_key"}, exclude_none=True)

    @property
    def value(self) -> float | None:
        """The value of the feedback if the proxy has no `on_feedback` hook. The value is None if
        the feedback has neither a score nor thumbs.

        >>> FeedbackBody(id="a", thumbs="down").value, FeedbackBody(id="a", comment="Hm").value
        (-1.0, None)
        """
        return value_of(self.score, self.thumbs)


def value_of(score: float | None, thumbs: str | None) -> float | None:
    """Return the value of a feedback for a proxy without an `on_feedback` hook. The value is the
    score. Without a score, it is 1 for thumbs up and -1 for thumbs down. If both are None, return
    None."""
    if score is not None or thumbs is None:
        return score
    return 1.0 if thumbs == "up" else -1.0


class FeedbackIdConflict(ValueError):
    """Raised if the app sends a `feedback_id` again for the same answer, but with other content."""


def identify(
    body: FeedbackBody, earlier: Sequence[FeedbackRecord]
) -> tuple[str, FeedbackRecord | None]:
    """Return a pair. The first element is the id of the feedback. The second element is the
    original: the earlier feedback that `body` repeats. It is None if the feedback is new.

    `earlier` is all feedback about the same answer, oldest first.

    If the app sent a `feedback_id`, earlier feedback with the same `feedback_id` is the original.
    Raises FeedbackIdConflict if the original has other content. Without a `feedback_id`, earlier
    feedback with the same content is the original, except in these cases:

    * The earlier feedback was taken back or replaced.
    * The feedback has a value, and other feedback with a value was sent after the earlier feedback.
      Therefore the sequence thumbs up, down, up ends as up.
    * The feedback has an edit, and another edit was sent after the earlier feedback.
    """
    if body.feedback_id is not None:
        known = next((row for row in earlier if row.feedback_id == body.feedback_id), None)
        if known is not None and content_of(known) != body.content:
            raise FeedbackIdConflict(body.feedback_id)
        return body.feedback_id, known
    explicit = [row for row in earlier if row.kind == "feedback"]
    for row in reversed(explicit):
        if row.is_void or row.is_edit_void:
            continue
        if content_of(row) == body.content:
            return row.feedback_id, row
        has_value = body.value is not None and value_of(row.score, row.thumbs) is not None
        has_other_edit = body.edited is not None and row.edited not in (None, body.edited)
        if has_value or has_other_edit:
            break
    digest = hashlib.sha256(orjson.dumps(body.content, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return f"{digest[:16]}.{len(explicit)}", None


def content_of(row: FeedbackRecord) -> dict[str, Any]:
    """Return the content fields of a stored feedback (score, thumbs, edited, comment). Fields that
    are None are left out."""
    fields = {name: getattr(row, name) for name in ("score", "thumbs", "edited", "comment")}
    return {name: value for name, value in fields.items() if value is not None}


def replaceable(earlier: Sequence[FeedbackRecord]) -> list[FeedbackRecord]:
    """Return the feedback in `earlier` that is replaced by new feedback about the same answer. New
    feedback replaces explicit feedback that is still being processed, and explicit feedback that
    waits to be sent as a sample."""
    unused = (FeedbackState.RECEIVED, FeedbackState.WAITING)
    return [row for row in earlier if row.kind == "feedback" and row.state in unused]


def baseline_of(others: Sequence[float], num: int) -> float | None:
    """Return the baseline of a feedback: the mean of the latest values of the app's other feedback.
    `others` contains these values, the latest first. The baseline is None if the app has given
    fewer than `num` values, counting `others` and the value that needs the baseline.

    The advantage of a sample is proportional to the value of its feedback minus this baseline. If
    an app always sends the same feedback, this feedback therefore has no effect on training. If an
    app's feedback is mostly negative, the model is not pushed away from all of the app's answers.

    >>> baseline_of([1.0, -1.0, 1.0], 4), baseline_of([1.0], 4)
    (0.3333333333333333, None)
    """
    return fmean(others[:BASELINE_WINDOW]) if len(others) + 1 >= num else None
