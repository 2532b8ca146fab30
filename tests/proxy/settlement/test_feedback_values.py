"""What is said of an answer: what it counts for, what is the same said again, what centres it."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from fakevllm.config.reward import BASELINE_WINDOW
from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.settlement.feedback_values import (
    FeedbackBody,
    OtherContent,
    baseline_of,
    id_of,
    voided,
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


def kept(said: FeedbackBody, earlier: list[FeedbackRecord]) -> bool:
    """Whether it is new; it is among the earlier ones then."""
    feedback_id, known = id_of(said, earlier)
    if known is None:
        row = FeedbackRecord(
            group_id="g", feedback_id=feedback_id, received_at=len(earlier), **said.content
        )
        earlier.append(row)
    return known is None


@settings(deadline=None)
@given(st.lists(CONTENTS, max_size=6), st.lists(st.integers(2, 4), min_size=6, max_size=6))
def test_what_is_sent_again_before_anything_else_is_said_is_never_a_second_feedback(
    contents: list[dict[str, object]], times: list[int]
) -> None:
    earlier: list[FeedbackRecord] = []
    for content, num in zip(contents, times, strict=False):
        said = FeedbackBody.model_validate({"id": "a"} | content)
        assert sum(kept(said, earlier) for _ in range(num)) <= 1
    assert len({row.feedback_id for row in earlier}) == len(earlier)


@settings(deadline=None)
@given(st.lists(CONTENTS, max_size=6), st.randoms())
def test_what_has_a_name_is_one_feedback_in_any_order(
    contents: list[dict[str, object]], chance: random.Random
) -> None:
    earlier: list[FeedbackRecord] = []
    names = [{"id": "a", "feedback_id": str(at)} for at in range(len(contents))]
    pairs = zip(names, contents, strict=True)
    sent = [FeedbackBody.model_validate(name | content) for name, content in pairs]
    assert all([kept(said, earlier) for said in sent])
    chance.shuffle(sent)
    assert not any(kept(said, earlier) for said in sent)


def test_the_last_word_counts_where_somebody_changes_his_mind_twice() -> None:
    earlier: list[FeedbackRecord] = []
    up, down = FeedbackBody(id="a", thumbs="up"), FeedbackBody(id="a", thumbs="down")
    comment = FeedbackBody(id="a", comment="Hm")
    assert [kept(said, earlier) for said in (up, comment, down, up, up)] == [True] * 4 + [False]
    assert not kept(comment, earlier)
    assert earlier[-1].thumbs == "up" and len({row.feedback_id for row in earlier}) == 4


def test_a_name_stands_for_one_feedback_and_tells_equal_ones_apart() -> None:
    earlier: list[FeedbackRecord] = []
    up = {"id": "a", "thumbs": "up"}
    for name in ("one", "two"):
        assert kept(FeedbackBody.model_validate(up | {"feedback_id": name}), earlier)
    assert not kept(FeedbackBody.model_validate(up | {"feedback_id": "one"}), earlier)
    with pytest.raises(OtherContent):
        kept(
            FeedbackBody.model_validate({"id": "a", "thumbs": "down", "feedback_id": "one"}),
            earlier,
        )


def test_what_was_taken_back_may_be_said_once_more() -> None:
    said = FeedbackBody(id="a", thumbs="up")
    row = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, thumbs="up")
    gone = FeedbackRecord(
        group_id="g", feedback_id="f", received_at=0.0, thumbs="up", reason="taken_back"
    )
    assert id_of(said, [row])[1] is row
    assert id_of(said, [gone])[1] is None
    assert id_of(said, [gone])[0] not in ("f", id_of(said, [])[0])


@pytest.mark.parametrize("state", FeedbackState)
def test_only_what_has_not_been_used_yet_can_be_replaced(state: FeedbackState) -> None:
    row = FeedbackRecord(group_id="g", feedback_id="f", received_at=0.0, state=state)
    is_open = state in (FeedbackState.RECEIVED, FeedbackState.WAITING)
    assert voided([row]) == ([row] if is_open else [])


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
def test_what_a_feedback_counts_for(content: dict[str, object], value: float | None) -> None:
    said = FeedbackBody.model_validate({"id": "a"} | content)
    assert said.value == value
    assert said.takes_back is (content == {"thumbs": None})


@given(st.lists(NUMBERS, max_size=300), st.integers(2, 50))
def test_feedback_is_measured_by_enough_of_the_latest_others_or_not_at_all(
    others: list[float], num: int
) -> None:
    baseline = baseline_of(others, num)
    if len(others) + 1 < num:
        assert baseline is None
    else:
        assert baseline == fmean(others[:BASELINE_WINDOW])


@given(st.lists(NUMBERS, min_size=2, max_size=50))
def test_measured_by_each_other_advantages_add_up_to_nothing(values: list[float]) -> None:
    def advantage(at: int) -> float:
        baseline = baseline_of([*values[:at], *values[at + 1 :]], 2)
        assert baseline is not None
        return values[at] - baseline

    assert sum(map(advantage, range(len(values)))) == pytest.approx(0, abs=1e-9)


def test_ids_that_could_not_be_told_apart_in_a_sample_s_name_are_refused() -> None:
    for name in ("a/b", "", "a\n", "ä" * 101):
        with pytest.raises(ValidationError):
            FeedbackBody(id="a", thumbs="up", feedback_id=name)
