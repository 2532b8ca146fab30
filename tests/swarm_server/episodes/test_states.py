import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.episodes.states import (
    POST_DEADLINE_S,
    TRANSITIONS,
    EngineLifecycle,
    IllegalTransition,
)

statuses = st.sampled_from(list(EngineStatus))


def test_a_run_goes_through_its_states_in_order() -> None:
    engine = EngineLifecycle()
    for status in (
        EngineStatus.BOOTING,
        EngineStatus.ROLLING,
        EngineStatus.ROLLING_POST,
        EngineStatus.WEIGHT_SYNCING,
        EngineStatus.ROLLING,
        EngineStatus.OFFLINE,
    ):
        engine.move(status, now=0.0)
    assert engine.status is EngineStatus.OFFLINE


@given(st.lists(statuses, max_size=30))
def test_only_the_transitions_of_the_table_are_possible(moves: list[EngineStatus]) -> None:
    engine = EngineLifecycle()
    for status in moves:
        before = engine.status
        if status in TRANSITIONS[before]:
            engine.move(status, now=0.0)
        else:
            with pytest.raises(IllegalTransition):
                engine.move(status, now=0.0)
            assert engine.status is before


def test_every_state_can_move_to_offline() -> None:
    assert all(
        EngineStatus.OFFLINE in to
        for status, to in TRANSITIONS.items()
        if status is not EngineStatus.OFFLINE
    )


def test_post_rolling_ends_when_no_episode_is_claimed_or_the_deadline_has_passed() -> None:
    engine = EngineLifecycle()
    for status in (EngineStatus.BOOTING, EngineStatus.ROLLING, EngineStatus.ROLLING_POST):
        engine.move(status, now=100.0)
    assert engine.post_is_over(100.0, num_claimed=0)
    assert not engine.post_is_over(100.0 + POST_DEADLINE_S - 1, num_claimed=1)
    assert engine.post_is_over(100.0 + POST_DEADLINE_S, num_claimed=1)


def test_calls_are_answered_while_weights_sync() -> None:
    engine = EngineLifecycle()
    for status in (
        EngineStatus.BOOTING,
        EngineStatus.ROLLING,
        EngineStatus.ROLLING_POST,
        EngineStatus.WEIGHT_SYNCING,
    ):
        assert not engine.is_serving or status is not EngineStatus.BOOTING
        engine.move(status, now=0.0)
    assert engine.is_serving


def test_the_rolling_time_only_advances_in_the_rolling_state() -> None:
    engine = EngineLifecycle()
    for status, now, rolled_s in (
        (EngineStatus.BOOTING, 5.0, 0.0),
        (EngineStatus.ROLLING, 10.0, 0.0),
        (EngineStatus.ROLLING_POST, 14.0, 4.0),
        (EngineStatus.WEIGHT_SYNCING, 20.0, 4.0),
        (EngineStatus.ROLLING, 30.0, 4.0),
    ):
        engine.move(status, now)
        assert engine.seconds_rolling(now) == rolled_s
    assert engine.seconds_rolling(31.0) == 5.0
