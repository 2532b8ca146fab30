"""The weight of an episode in a step does not depend on its number of calls and branches."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_server.samples import call

from fakevllm_adapters.job.loss_spec import AGGREGATIONS, LossSpec
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms.loss_sequences import LossCall, call_shares
from fakevllm_server.training.step_plan import plan_step
from fakevllm_server.types.backend import Call
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode

MASKED = call(untrainable="missing_logprob", ids=(9, 9, 9))
Lengths = list[int]
"""The length of each call's answer in an episode."""
EPISODES = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=2, max_size=4)


def answered(num_tokens: int) -> RecordedCall:
    return call(ids=tuple(range(5, 5 + num_tokens)))


def total_weights(episodes: list[list[RecordedCall]], mode: str) -> list[float]:
    """Return the sum of the factors of all token losses, for each episode."""
    job = TrainJob(algorithm="rloo")
    scored = [ScoredEpisode(at, float(at), calls) for at, calls in enumerate(episodes)]
    calls = plan_step(1, [FinishedGroup("g", scored)], job).batch.calls
    spec = LossSpec(loss_agg_mode=mode, loss_scale_factor=7.0)
    shares = call_shares([LossCall(one.unit, one.weight, one.num_trained) for one in calls], spec)
    weights: defaultdict[int, float] = defaultdict(float)
    for one, share in zip(calls, shares, strict=True):
        weights[_index(one)] += share.scale * one.num_trained
    return [weights[at] for at in range(len(episodes))]


def _index(one: Call) -> int:
    return int((one.unit or "").split()[1])


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(episodes=EPISODES, num_times=st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_repeating_the_calls_of_an_episode_does_not_change_its_weight(
    mode: str, episodes: list[Lengths], num_times: list[int]
) -> None:
    once = [[answered(num) for num in lengths] for lengths in episodes]
    again = [calls * times for calls, times in zip(once, num_times, strict=False)]
    assert total_weights(again, mode) == pytest.approx(total_weights(once, mode))


@pytest.mark.parametrize("mode", AGGREGATIONS)
@given(episodes=EPISODES, num_masked=st.lists(st.integers(0, 5), min_size=4, max_size=4))
def test_untrainable_calls_do_not_change_the_weight_of_their_episode(
    mode: str, episodes: list[Lengths], num_masked: list[int]
) -> None:
    plain = [[answered(num) for num in lengths] for lengths in episodes]
    masked = [[MASKED] * num + calls for num, calls in zip(num_masked, plain, strict=False)]
    assert total_weights(masked, mode) == pytest.approx(total_weights(plain, mode))


@given(episodes=EPISODES)
def test_episodes_have_equal_weights_in_a_mean_over_sequences(episodes: list[Lengths]) -> None:
    weights = total_weights(
        [[answered(num) for num in lengths] for lengths in episodes], "seq-mean-token-mean"
    )
    assert weights == pytest.approx([1 / len(episodes)] * len(episodes))
