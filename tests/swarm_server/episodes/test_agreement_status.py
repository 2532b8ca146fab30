"""The status that AgentJet's clients see while they wait for a step that they agreed to."""

from __future__ import annotations

import doctest
from collections.abc import Sequence
from itertools import groupby

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


@pytest.mark.parametrize("phase", [0.0, 1.0, 2.5, 4.9])
@pytest.mark.parametrize("interval_s", [3, 14, 25, 40])
@pytest.mark.parametrize("sync_s", [0.1, 2.0])
def test_short_steps_one_after_another_show_each_state_and_rolling_twice_again_and_again(
    interval_s: int, sync_s: float, phase: float
) -> None:
    steps = [
        move
        for start in range(100, 400, interval_s)
        for move in ((start, POST), (start + 0.1, SYNC), (start + 0.1 + sync_s, ROLLING))
    ]
    reported = seen([*START, *steps], [100.0 + phase + POLL_S * number for number in range(60)])
    shown = [(one, len(list(same))) for one, same in groupby(reported)]
    order = [one for one, _ in shown]
    assert len(order) >= 20 and order == ([POST, SYNC, ROLLING] * len(order))[: len(order)]
    assert all(num >= 2 for _, num in shown[:-1])


def test_rolling_is_shown_after_a_long_step_although_the_next_step_begins_at_once() -> None:
    long = [(100.0, POST), (101.0, SYNC), (200.0, ROLLING)]
    moves = [*START, *long, (200.1, POST), (200.2, SYNC), (200.3, ROLLING)]
    assert seen(moves, [199.0, 201.0, 211.0, 213.0, 225.0, 237.0]) == [
        *(SYNC, ROLLING, ROLLING),
        *(POST, SYNC, ROLLING),
    ]


@pytest.mark.parametrize("off", [OFFLINE, BOOTING])
def test_an_engine_that_is_off_or_boots_is_never_hidden(off: EngineStatus) -> None:
    moves = [*START, (100.0, POST), (100.1, SYNC), (100.2, off), (101.0, BOOTING), (102.0, ROLLING)]
    assert seen(moves, [100.15, 100.3, 103.0]) == [POST, off, ROLLING]


def test_each_state_is_held_for_longer_than_two_looks_and_a_delay_take() -> None:
    assert HOLD_S > 2 * POLL_S + 1
