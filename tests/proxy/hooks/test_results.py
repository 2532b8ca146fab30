"""The checks of the values that hooks return."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.hooks.results import (
    HookFailure,
    SubmitPlan,
    changed_keys,
    read_plan,
    read_rewards,
)
from fakevllm_adapters.protocol.swarm import MAX_REWARD

NUMBER = st.floats(-MAX_REWARD, MAX_REWARD) | st.integers(-(10**9), 10**9)
REWARD = st.none() | NUMBER | st.booleans()


def reason(outcome: object) -> str:
    assert isinstance(outcome, HookFailure)
    return outcome.reason


@given(st.lists(REWARD, max_size=9))
def test_numbers_and_nones_are_kept_in_order(items: list[float | None]) -> None:
    assert read_rewards(items, len(items)) == [
        None if item is None else float(item) for item in items
    ]


JUNK = (
    st.none()
    | st.text()
    | st.floats()
    | st.lists(st.integers())
    | st.binary()
    | st.complex_numbers()
)


@given(JUNK | st.lists(JUNK | st.lists(JUNK, max_size=2), max_size=3))
def test_any_return_value_becomes_finite_rewards_or_a_reason(value: object) -> None:
    outcome = read_rewards(value, 2)
    if isinstance(outcome, HookFailure):
        slugs = {"hook_type", "hook_length", "hook_nan", "hook_value"}
        assert outcome.reason.partition(":")[0] in slugs
    else:
        assert len(outcome) == 2
        assert all(reward is None or math.isfinite(reward) for reward in outcome)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("ab", "hook_type: got str, want a list"),
        (None, "hook_type: got NoneType, want a list"),
        ([1.0], "hook_length: got 1, want 2"),
        ([1.0, math.nan], "hook_nan: reward 1 is nan"),
        ([-math.inf, 0], "hook_nan: reward 0 is -inf"),
        ([0, -1e10], "hook_value: reward 1 is -1e+10, beyond 1e+09"),
        ([1, "2"], "hook_type: reward 1 is str, want a number or None"),
        ([1, b"2"], "hook_type: reward 1 is bytes, want a number or None"),
        ([10**400, 1], "hook_type: reward 0 is int, want a number or None"),
    ],
)
def test_a_wrong_return_value_is_reported(value: object, expected: str) -> None:
    assert reason(read_rewards(value, 2)) == expected


def test_number_like_objects_count_as_numbers() -> None:
    scalars: list[Any] = [Decimal("0.25"), Fraction(1, 8), True]
    assert read_rewards(scalars, 3) == [0.25, 0.125, 1.0]
    assert read_rewards((None, None), 2) == [None, None]


WRONG_PLANS: list[tuple[Any, str]] = [
    (0, "hook_value: got 0"),
    (257, "hook_value: got 257, want at most 256"),
    ([{}] * 257, "hook_value: got 257 dicts, want at most 256"),
    (True, "hook_type: got bool"),
    (2.0, "hook_type: got float"),
    ([], "hook_value: got an empty list"),
    ([{}, 3], "hook_type: item 1 is int"),
    ([{"temperature": 1}, {}], "hook_value: item 0 must be {}"),
    ([{}, {"stop": "."}, {"n": 3}], "hook_value: item 2 sets n, which is the app's own"),
    ([{}, {"seed": 1, "stream_options": {}}], "hook_value: item 1 sets stream_options"),
    ([{}, {"stop": object()}], "hook_type: the overrides are not JSON"),
]


@pytest.mark.parametrize(("value", "expected"), WRONG_PLANS)
def test_a_wrong_plan_is_reported(value: object, expected: str) -> None:
    assert reason(read_plan(value)).startswith(expected)


def test_a_plan_is_a_number_a_list_or_nothing() -> None:
    assert read_plan(None) == SubmitPlan()
    assert read_plan(6) == SubmitPlan(num=6)
    assert read_plan([{}, {"seed": 1}]) == SubmitPlan(overrides=[{}, {"seed": 1}])


class Incomparable:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # pyright: ignore[reportAssignmentType] # Python's own spelling of unhashable


@pytest.mark.parametrize("value", [object(), Incomparable(), {1j: 1}, 2**70, [lambda: None]])
def test_annotations_that_json_cannot_express_are_left_out(value: Any) -> None:
    assert changed_keys({"content": "a"}, {"content": "a", "bad": value, "good": 1}) == {"good": 1}


def test_keys_changed_in_place_or_replaced_are_annotations() -> None:
    before: dict[str, Any] = {"content": "a", "tags": ["x"], "kind": 1}
    after: dict[str, Any] = {"content": "a", "tags": ["x", "y"], "kind": 2}
    assert changed_keys(before, after) == {"tags": ["x", "y"], "kind": 2}


def test_numpy_numbers_are_rewards_and_annotations() -> None:
    np = pytest.importorskip("numpy")
    assert read_rewards([np.float32(0.5), np.int64(2), np.array(3.0)], 3) == [0.5, 2.0, 3.0]
    assert changed_keys({}, {"score": np.float32(0.5), "ids": np.array([1, 2])}) == {
        "score": 0.5,
        "ids": [1, 2],
    }


def test_a_plan_may_have_the_largest_group_that_the_server_accepts() -> None:
    assert read_plan(256) == SubmitPlan(num=256)
    largest: list[dict[str, Any]] = [{}] * 256
    assert read_plan(largest) == SubmitPlan(overrides=largest)
