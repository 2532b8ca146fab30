"""The status that AgentJet's clients see while they wait for a step that they agreed to."""

from __future__ import annotations

import doctest
from collections.abc import Sequence

import pytest

from fakevllm_adapters.protocol.swarm import EngineStatus
from fakevllm_server.episodes import agreement_status
from fakevllm_server.episodes.agreement_status import HOLD_S, AgreementStatus

POLL_S = 5.0
"""Seconds between two looks of AgentJet's client at the status."""
OFFLINE, BOOTING, ROLLING, POST, SYNC = EngineStatus
Moves = Sequence[tuple[float, EngineStatus]]
START: Moves = [(0.0, BOOTING), (1.0, ROLLING)]


def seen(moves: Moves, times: Sequence[float]) -> list[EngineStatus]:
    """Return the status that is reported at each of the times, while the engine makes the moves."""
    status, waiting = AgreementStatus(), list(moves)
    result: list[EngineStatus] = []
    for now in times:
        while waiting and waiting[0][0] <= now:
            at, to = waiting.pop(0)
            status.moved(to, at)
        result.append(status.at(now))
    return result


def test_the_docstring_example_holds() -> None:
    assert doctest.testmod(agreement_status).failed == 0


@pytest.mark.parametrize("phase", [0.0, 0.1, 1.0, 2.5, 4.9])
@pytest.mark.parametrize(("post_s", "sync_s"), [(0.0, 0.0), (0.01, 0.2), (3.0, 30.0), (60.0, 0.5)])
def test_a_client_that_looks_every_five_seconds_sees_each_state_twice(
    phase: float, post_s: float, sync_s: float
) -> None:
    step = [(100.0, POST), (100.0 + post_s, SYNC), (100.0 + post_s + sync_s, ROLLING)]
    looks = [90.0 + phase + POLL_S * number for number in range(40)]
    reported = seen([*START, *step], looks)
    assert reported.count(POST) >= 2 and reported.count(SYNC) >= 2
    order = [one for one, before in zip(reported, [None, *reported], strict=False) if one != before]
    assert order == [ROLLING, POST, SYNC, ROLLING]


def test_a_state_that_lasts_longer_is_reported_for_as_long_as_it_lasts() -> None:
    moves = [*START, (100.0, POST), (150.0, SYNC), (250.0, ROLLING)]
    assert seen(moves, [149.0, 151.0, 249.0, 251.0]) == [POST, SYNC, SYNC, ROLLING]


def test_short_steps_one_after_another_show_both_states_again_and_again() -> None:
    steps = [
        move
        for start in range(100, 200, 3)
        for move in ((start, POST), (start + 0.1, SYNC), (start + 0.2, ROLLING))
    ]
    reported = seen([*START, *steps], [100.0 + POLL_S * number for number in range(20)])
    order = [one for one, before in zip(reported, [None, *reported], strict=False) if one != before]
    assert order == [POST, SYNC, POST, SYNC, POST, SYNC, POST, SYNC][: len(order)]
    assert len(order) > 6 and all(reported.count(one) >= 8 for one in (POST, SYNC))


@pytest.mark.parametrize("off", [OFFLINE, BOOTING])
def test_an_engine_that_is_off_or_boots_is_never_hidden(off: EngineStatus) -> None:
    moves = [*START, (100.0, POST), (100.1, SYNC), (100.2, off), (101.0, BOOTING), (102.0, ROLLING)]
    assert seen(moves, [100.15, 100.3, 103.0]) == [POST, off, ROLLING]


def test_each_state_is_held_for_longer_than_two_looks_and_a_delay_take() -> None:
    assert HOLD_S > 2 * POLL_S + 1
