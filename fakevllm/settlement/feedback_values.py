"""What apps say of answers they got, and what it counts for. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import fmean
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fakevllm.config.reward import BASELINE_WINDOW
from fakevllm.ledger.records import FeedbackRecord, FeedbackState

TOO_SMALL = 1e-6
"""An advantage that teaches nothing."""


class FeedbackBody(BaseModel):
    """The body of POST /v1/feedback. What it does not know it ignores, as vLLM does."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    id: str = Field(min_length=1, max_length=300)
    """Of the answer, as the app got it."""
    score: float | None = Field(default=None, ge=-1, le=1, strict=True)
    thumbs: Literal["up", "down"] | None = None
    edited: str | None = Field(default=None, min_length=1, max_length=1_000_000)
    """What the answer should have been."""
    comment: str | None = Field(default=None, min_length=1, max_length=100_000)
    feedback_id: str | None = Field(default=None, pattern="^[A-Za-z0-9_.:-]{1,100}$")

    @model_validator(mode="after")
    def _says_something(self) -> FeedbackBody:
        if not self.model_fields_set & {"score", "thumbs", "edited", "comment"}:
            raise ValueError(
                "say at least one of score (-1 to 1), thumbs ('up' or 'down'), edited, comment"
            )
        return self

    @property
    def takes_back(self) -> bool:
        """All null: as if nothing had been said."""
        return not self.content

    @property
    def content(self) -> dict[str, Any]:
        return self.model_dump(exclude={"id", "feedback_id"}, exclude_none=True)

    @property
    def value(self) -> float | None:
        """What it counts for, unless a hook says otherwise; None: nothing.

        >>> FeedbackBody(id="a", thumbs="down").value, FeedbackBody(id="a", comment="Hm").value
        (-1.0, None)
        """
        return value_of(self.score, self.thumbs)


def value_of(score: float | None, thumbs: str | None) -> float | None:
    """A score is surer than thumbs."""
    if score is not None or thumbs is None:
        return score
    return 1.0 if thumbs == "up" else -1.0


class OtherContent(ValueError):
    """A `feedback_id` that names another feedback about the same answer."""


def id_of(
    said: FeedbackBody, earlier: Sequence[FeedbackRecord]
) -> tuple[str, FeedbackRecord | None]:
    """What a feedback is called, and the one of `earlier`, all about the same answer, that it is
    sent again. Without a name, equal content is the same feedback, unless that one was taken back
    or replaced meanwhile, or another number has been said since: who says up, down, up means up.
    Raises OtherContent."""
    if said.feedback_id is not None:
        known = next((one for one in earlier if one.feedback_id == said.feedback_id), None)
        if known is not None and content_of(known) != said.content:
            raise OtherContent(said.feedback_id)
        return said.feedback_id, known
    own = [one for one in earlier if one.kind == "feedback"]
    for one in reversed(own):
        if one.is_void:
            continue
        if content_of(one) == said.content:
            return one.feedback_id, one
        if said.value is not None and value_of(one.score, one.thumbs) is not None:
            break
    digest = hashlib.sha256(orjson.dumps(said.content, option=orjson.OPT_SORT_KEYS)).hexdigest()
    return f"{digest[:16]}.{len(own)}", None


def content_of(row: FeedbackRecord) -> dict[str, Any]:
    found = {name: getattr(row, name) for name in ("score", "thumbs", "edited", "comment")}
    return {name: value for name, value in found.items() if value is not None}


def voided(earlier: Sequence[FeedbackRecord]) -> list[FeedbackRecord]:
    """What a later word about the same answer replaces: all that has not been trained with yet."""
    states = (FeedbackState.RECEIVED, FeedbackState.WAITING)
    return [one for one in earlier if one.kind == "feedback" and one.state in states]


def baseline_of(others: Sequence[float], num: int) -> float | None:
    """What a feedback is measured by, `others` being the app's others, latest first; None while
    there are fewer than `num` with it. Feedback that is always the same then teaches nothing, and
    a mostly negative stream does not push the model away from all it says.

    >>> baseline_of([1.0, -1.0, 1.0], 4), baseline_of([1.0], 4)
    (0.3333333333333333, None)
    """
    return fmean(others[:BASELINE_WINDOW]) if len(others) + 1 >= num else None
