from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.job.loss_spec import AGGREGATIONS, LossSpec
from fakevllm_server.algorithms.loss_sequences import (
    LossCall,
    call_shares,
    token_weight,
    unit_labels,
)


@dataclass(frozen=True)
class Turn:
    prompt_ids: list[int]
    response_ids: list[int]


FIRST = Turn([1], [2])
SECOND = Turn([1, 2, 9], [3])
RETRY = Turn([1, 2, 9], [4])
THIRD = Turn([1, 2, 9, 4, 9], [5])
UNRELATED = Turn([7], [8])


def labels(*turns: Turn, loss_unit: str = "timeline") -> list[int]:
    return unit_labels(turns, loss_unit)


def test_units_of_calls_and_episodes_do_not_depend_on_tokens() -> None:
    assert labels(FIRST, SECOND, UNRELATED, loss_unit="call") == [0, 1, 2]
    assert labels(FIRST, SECOND, UNRELATED, loss_unit="episode") == [0, 0, 0]


def test_turns_that_continue_each_other_are_one_timeline() -> None:
    assert labels(FIRST, SECOND) == [0, 0]


def test_a_prompt_that_differs_starts_a_timeline() -> None:
    assert labels(FIRST, Turn([1, 3, 9], [3])) == [0, 1]


def test_the_second_of_two_continuations_starts_a_timeline() -> None:
    assert labels(FIRST, SECOND, RETRY) == [0, 0, 1]


def test_a_call_continues_the_longest_matching_timeline() -> None:
    assert labels(FIRST, SECOND, RETRY, UNRELATED, THIRD) == [0, 0, 1, 2, 1]
    assert labels(FIRST, Turn([1, 2], []), THIRD) == [0, 0, 0]


def test_the_weights_of_an_episodes_calls_sum_to_1() -> None:
    assert token_weight("episode", 4) == 0.25
    assert token_weight("call", 4) == token_weight("timeline", 4) == 1.0


CALLS = [LossCall("a", 1.0, 3), LossCall("b", 0.5, 2), LossCall("b", 0.5, 4), LossCall("c", 1.0, 0)]


@pytest.mark.parametrize(
    ("mode", "scales"),
    [
        ("token-mean", [1 / 6, 0.5 / 6, 0.5 / 6, 0]),
        ("token-sum", [1, 0.5, 0.5, 0]),
        ("seq-mean-token-sum", [1 / 2, 0.5 / 2, 0.5 / 2, 0]),
        ("seq-mean-token-mean", [1 / 2 / 3, 0.5 / 2 / 3, 0.5 / 2 / 3, 0]),
        ("seq-mean-token-sum-norm", [1 / 2 / 6, 0.5 / 2 / 6, 0.5 / 2 / 6, 0]),
    ],
)
def test_each_aggregation_scales_tokens_by_its_formula(mode: str, scales: list[float]) -> None:
    shares = call_shares(CALLS, LossSpec(loss_agg_mode=mode))
    assert [share.scale for share in shares] == pytest.approx(scales)
    assert [share.token_share for share in shares] == pytest.approx([1 / 6, 1 / 12, 1 / 12, 0])


def test_the_default_scale_factor_is_the_length_of_the_longest_unit() -> None:
    norm = LossSpec(loss_agg_mode="seq-mean-token-sum-norm")
    default = call_shares(CALLS, norm)
    assert default == call_shares(CALLS, replace(norm, loss_scale_factor=6.0))
    assert default != call_shares(CALLS, replace(norm, loss_scale_factor=8.0))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_call_with_weight_0_changes_no_other_weight(mode: str) -> None:
    spec = LossSpec(loss_agg_mode=mode)
    masked = [LossCall("b", 0.0, 7), *CALLS, LossCall("d", 0.0, 9)]
    shares = call_shares(masked, spec)
    assert shares[0].scale == shares[-1].scale == 0.0
    assert [s.scale for s in shares[1:-1]] == [s.scale for s in call_shares(CALLS, spec)]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_step_without_trained_tokens_has_scale_0(mode: str) -> None:
    spec = LossSpec(loss_agg_mode=mode)
    assert call_shares([], spec) == []
    assert [s.scale for s in call_shares([LossCall("a", 1.0, 0), LossCall("b", 0.0, 3)], spec)] == [
        0.0,
        0.0,
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0.5, 1.0]), st.integers(1, 5)), min_size=1
    )
)
def test_the_weights_of_a_mean_sum_to_1(calls: list[tuple[int, float, int]]) -> None:
    loss_calls = [LossCall(*call) for call in calls]
    for mode in ("token-mean", "seq-mean-token-mean"):
        shares = call_shares(loss_calls, LossSpec(loss_agg_mode=mode))
        for kind in ("scale", "token_share"):
            total = sum(
                getattr(share, kind) * call.num_tokens
                for share, call in zip(shares, loss_calls, strict=True)
            )
            assert total == pytest.approx(1.0)
