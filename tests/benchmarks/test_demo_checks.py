"""What benchmarks.demo_kills must not overlook."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.demo_app import Asked
from benchmarks.demo_checks import Row, check_acknowledged, check_errors, check_one_group_each
from benchmarks.kills import Killed, Victim, plan
from benchmarks.mixed_checks import Finding

TRAINED, CONSUMED = Row("trained", None), Row("consumed", None)
STALE = Row("dropped", "stale")


def failed(*findings: Finding) -> list[str]:
    return [one.what for one in findings if one.is_good is False]


def test_every_victim_is_killed_as_often_and_the_same_seed_means_the_same_moments() -> None:
    kills = plan(random.Random(7), 100, 4)
    assert kills == plan(random.Random(7), 100, 4) != plan(random.Random(8), 100, 4)
    for victim in Victim:
        assert sum(kill.victim is victim for kill in kills) == 4
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)


@pytest.mark.parametrize(
    ("journal", "ledger"),
    [
        ({"g": CONSUMED}, {"g": TRAINED}),
        ({"g": STALE}, {"g": STALE}),
        ({"g": CONSUMED, "a": Row("dropped", "aborted")}, {"g": TRAINED}),
        ({"g": CONSUMED}, {"g": TRAINED, "a": Row("failed", "upstream_503")}),
    ],
)
def test_files_that_tell_the_same_are_fine(journal: dict[str, Row], ledger: dict[str, Row]) -> None:
    assert failed(*check_acknowledged(["g"], journal, ledger)) == []


@pytest.mark.parametrize(
    ("journal", "ledger"),
    [
        ({}, {"g": TRAINED}),
        ({"g": CONSUMED}, {}),
        ({"g": CONSUMED}, {"g": Row("pooled", None)}),
        ({"g": CONSUMED}, {"g": Row("lost", "server_crashed")}),
        ({"g": STALE}, {"g": TRAINED}),
        ({"g": STALE}, {"g": Row("dropped", "no_group")}),
        ({"g": Row("pooled", None)}, {"g": Row("pooled", None)}),
        ({"g": CONSUMED}, {"g": TRAINED, "b": TRAINED}),
    ],
)
def test_files_that_tell_otherwise_are_told(
    journal: dict[str, Row], ledger: dict[str, Row]
) -> None:
    assert failed(*check_acknowledged(["g"], journal, ledger)) != []


def asked(began: float = 0.0, ended: float | None = 1.0, *errors: str) -> Asked:
    return Asked("beside-1", began, ended, [*errors])


def groups(num: int, state: str = "trained") -> list[dict[str, Any]]:
    return [{"task_id": "beside-1", "state": state}] * num


@pytest.mark.parametrize(
    ("num", "one", "is_fine"),
    [
        (1, asked(), True),
        (0, asked(), False),
        (0, asked(0.0, None), False),  # and nothing was answered at all
        (0, asked(99.0, 99.9), True),  # the proxy was killed before it could write the row
        (0, asked(99.0, 101.0), False),
        (2, asked(), False),
        (2, asked(99.0, 101.0), True),  # the first answer did not get through
        (2, asked(101.0, 102.0), False),
    ],
)
def test_an_answered_request_has_one_group_but_for_a_killed_proxy(
    num: int, one: Asked, is_fine: bool
) -> None:
    kills = [Killed(Victim.PROXY, 100.0), Killed(Victim.SERVER, 1.1)]
    assert (failed(*check_one_group_each(groups(num), kills, [one])) == []) is is_fine


def test_a_group_that_answered_nobody_is_none_of_its_requests() -> None:
    rows = [*groups(1), *groups(1, "failed")]
    assert failed(*check_one_group_each(rows, [], [asked()])) == []


@pytest.mark.parametrize(("victim", "is_fine"), [(Victim.PROXY, True), (Victim.ENGINE, False)])
def test_an_error_is_the_fault_of_a_killed_proxy_alone(victim: Victim, is_fine: bool) -> None:
    told = check_errors([Killed(victim, 0.5)], [asked(0.0, 1.0, "503")])
    assert told.is_good is is_fine
    assert check_errors([Killed(victim, 2.0)], [asked(0.0, 1.0, "503")]).is_good is False
