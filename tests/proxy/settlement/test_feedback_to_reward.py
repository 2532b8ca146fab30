"""The value of feedback, its identity and its baseline."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fakevllm.config.reward import BASELINE_WINDOW
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.settlement.feedback_to_reward import (
    FeedbackBody,
    FeedbackIdConflict,
    baseline_of,
    identify,
    replaceable,
)

NUMBERS = st.floats(-1, 1)
CONTENTS = st.fixed_dictionaries(
    {},
    optional={
        "score": NUMBERS,
        "thumbs": st.sampled_from(["up", "down"]),
        "edited": st.text(min_size=1, max_size=5),
        "comment": st.text(min_size=1, max_size=5),
    },
).filter(bool)


def is_added(body: FeedbackBody, earlier: list[FeedbackRecord]) -> bool:
    """Return True if the feedback is new. New feedback is added to `earlier`."""
    feedback_id, known = identify(body, earlier)
    if known is None:
        row = FeedbackRecord(
            group_id="g", feedback_id=feedback_id, received_at=len(earlier), **body.content
        )
        earlier.append(row)
    return known is None


@settings(deadline=None)
@given(st.lists(CONTENTS, max_size=6), st.lists(st.integers(2, 4), min_size=6, max_size=6))
def test_feedback_that_is_repeated_before_other_feedback_is_never_added_twice(
    contents: list[dict[str, object]], times: list[int]
) -> None:
    earlier: list[FeedbackRecord] = []
    for content, num in zip(contents, times, strict=False):
        body = FeedbackBody.model_validate({"id": "a"} | content)
        assert sum(is_added(body, earlier) for _ in range(num)) <= 1
    assert len({row.feedback_id for row in earlier}) == len(earlier)


@settings(deadline=None)
@given(st.lists(CONTENTS, max_size=6), st.randoms())
def test_feedback_with_an_id_is_added_once_in_any_order(
    contents: list[dict[str, object]], rng: random.Random
) -> None:
    earlier: list[FeedbackRecord] = []
    names = [{"id": "a", "feedback_id": str(at)} for at in range(len(contents))]
    pairs = zip(names, contents, strict=True)
    sent = [FeedbackBody.model_validate(name | content) for name, content in pairs]
    assert all([is_added(body, earlier) for body in sent])
    rng.shuffle(sent)
    assert not any(is_added(body, earlier) for body in sent)


def test_after_up_down_up_the_last_number_counts() -> None:
    earlier: list[FeedbackRecord] = []
    up, down = FeedbackBody(id="a", thumbs="up"), FeedbackBody(id="a", thumbs="down")
    comment = FeedbackBody(id="a", comment="Hm")
    assert [is_added(body, earlier) for body in (up, comment, down, up, up)] == [True] * 4 + [False]
    assert not is_added(comment, earlier)
    assert earlier[-1].thumbs == "up" and len({row.feedback_id for row in earlier}) == 4


def test_a_feedback_id_names_one_feedback_and_tells_equal_ones_apart() -> None:
    earlier: list[FeedbackRecord] = []
    up = {"id": "a", "thumbs": "up"}
    for name in ("one", "two"):
        assert is_added(FeedbackBody.model_validate(up | {"feedback_id": name}), earlier)
    assert not is_added(FeedbackBody.model_validate(up | {"feedback_id": "one"}), earlier)
    with pytest.raises(FeedbackIdConflict):
        is_added(
            FeedbackBody.model_validate({"id": "a", "thumbs": "down", "feedback_id": "one"}),
            earlier,
        )


def test_feedback_that_was_taken_back_can_be_sent_again() -> None:
    body = FeedbackBody(id="a", thumbs="up")
    row = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, thumbs="up")
    gone = FeedbackRecord(
        group_id="g", feedback_id="f", received_at=0.0, thumbs="up", reason="taken_back"
    )
    assert identify(body, [row])[1] is row
    assert identify(body, [gone])[1] is None
    assert identify(body, [gone])[0] not in ("f", identify(body, [])[0])


@pytest.mark.parametrize("state", FeedbackState)
def test_only_unused_feedback_can_be_replaced(state: FeedbackState) -> None:
    row = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, state=state)
    is_open = state in (FeedbackState.RECEIVED, FeedbackState.WAITING)
    assert replaceable([row]) == ([row] if is_open else [])


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ({"score": 0.25, "thumbs": "down"}, 0.25),
        ({"score": 0.0}, 0.0),
        ({"thumbs": "up", "comment": "good"}, 1.0),
        ({"thumbs": "down"}, -1.0),
        ({"comment": "bad!"}, None),
        ({"edited": "It is 7."}, None),
        ({"thumbs": None}, None),
    ],
)
def test_the_value_of_feedback_without_a_hook(
    content: dict[str, object], value: float | None
) -> None:
    body = FeedbackBody.model_validate({"id": "a"} | content)
    assert body.value == value
    assert body.is_withdrawal is (content == {"thumbs": None})


@given(st.lists(NUMBERS, max_size=300), st.integers(2, 50))
def test_the_baseline_is_the_mean_of_the_latest_others_or_none_if_there_are_too_few(
    others: list[float], num: int
) -> None:
    baseline = baseline_of(others, num)
    if len(others) + 1 < num:
        assert baseline is None
    else:
        assert baseline == fmean(others[:BASELINE_WINDOW])


@given(st.lists(NUMBERS, min_size=2, max_size=50))
def test_advantages_relative_to_the_others_sum_to_zero(values: list[float]) -> None:
    def advantage(at: int) -> float:
        baseline = baseline_of([*values[:at], *values[at + 1 :]], 2)
        assert baseline is not None
        return values[at] - baseline

    assert sum(map(advantage, range(len(values)))) == pytest.approx(0, abs=1e-9)


def test_feedback_ids_that_would_make_sample_ids_ambiguous_are_refused() -> None:
    for name in ("a/b", "", "a\n", "ä" * 101):
        with pytest.raises(ValidationError):
            FeedbackBody(id="a", thumbs="up", feedback_id=name)
