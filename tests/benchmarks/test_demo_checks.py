"""The checks of benchmarks.demo_kills find what they are for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.demo_parts.checks import (
    GroupRow,
    check_acknowledged,
    check_errors,
    check_one_group_each,
)
from benchmarks.demo_parts.concurrent_app import AppRequest
from benchmarks.demo_parts.process_kills import CompletedKill, Victim, plan_kills
from benchmarks.ledger_checks import Finding

TRAINED, CONSUMED = GroupRow("trained", None), GroupRow("consumed", None)
STALE = GroupRow("dropped", "stale")


def failed_claims(*findings: Finding) -> list[str]:
    return [finding.claim for finding in findings if finding.holds is False]


def test_every_victim_is_killed_equally_often_at_moments_that_the_seed_decides() -> None:
    kills = plan_kills(random.Random(7), 100, 4)
    assert kills == plan_kills(random.Random(7), 100, 4)
    assert kills != plan_kills(random.Random(8), 100, 4)
    for victim in Victim:
        assert sum(kill.victim is victim for kill in kills) == 4
    assert [kill.step for kill in kills] == sorted(kill.step for kill in kills)


@pytest.mark.parametrize(
    ("journal", "ledger"),
    [
        ({"g": CONSUMED}, {"g": TRAINED}),
        ({"g": STALE}, {"g": STALE}),
        ({"g": CONSUMED, "a": GroupRow("dropped", "aborted")}, {"g": TRAINED}),
        ({"g": CONSUMED}, {"g": TRAINED, "a": GroupRow("failed", "upstream_503")}),
    ],
)
def test_a_journal_and_a_ledger_that_agree_pass(
    journal: dict[str, GroupRow], ledger: dict[str, GroupRow]
) -> None:
    assert failed_claims(*check_acknowledged(["g"], journal, ledger)) == []


@pytest.mark.parametrize(
    ("journal", "ledger"),
    [
        ({}, {"g": TRAINED}),
        ({"g": CONSUMED}, {}),
        ({"g": CONSUMED}, {"g": GroupRow("pooled", None)}),
        ({"g": CONSUMED}, {"g": GroupRow("lost", "server_crashed")}),
        ({"g": STALE}, {"g": TRAINED}),
        ({"g": STALE}, {"g": GroupRow("dropped", "no_group")}),
        ({"g": GroupRow("pooled", None)}, {"g": GroupRow("pooled", None)}),
        ({"g": CONSUMED}, {"g": TRAINED, "b": TRAINED}),
    ],
)
def test_a_journal_and_a_ledger_that_disagree_fail(
    journal: dict[str, GroupRow], ledger: dict[str, GroupRow]
) -> None:
    assert failed_claims(*check_acknowledged(["g"], journal, ledger)) != []


def request(started_at: float = 0.0, answered_at: float | None = 1.0, *errors: str) -> AppRequest:
    return AppRequest("beside-1", started_at, answered_at, [*errors])


def groups(num: int, state: str = "trained") -> list[dict[str, Any]]:
    return [{"task_id": "beside-1", "state": state}] * num


@pytest.mark.parametrize(
    ("num", "sent", "passes"),
    [
        (1, request(), True),
        (0, request(), False),
        (0, request(0.0, None), False),  # no request was answered at all
        (0, request(99.0, 99.9), True),  # the proxy was killed before it could write the row
        (0, request(99.0, 101.0), False),
        (2, request(), False),
        (2, request(99.0, 101.0), True),  # the first answer did not get through
        (2, request(101.0, 102.0), False),
    ],
)
def test_an_answered_request_must_have_one_group_unless_the_proxy_was_killed(
    num: int, sent: AppRequest, passes: bool
) -> None:
    kills = [CompletedKill(Victim.PROXY, 100.0), CompletedKill(Victim.SERVER, 1.1)]
    assert (failed_claims(*check_one_group_each(groups(num), kills, [sent])) == []) is passes


def test_a_failed_group_does_not_count() -> None:
    rows = [*groups(1), *groups(1, "failed")]
    assert failed_claims(*check_one_group_each(rows, [], [request()])) == []


@pytest.mark.parametrize(("victim", "passes"), [(Victim.PROXY, True), (Victim.ENGINE, False)])
def test_only_a_kill_of_the_proxy_explains_an_error(victim: Victim, passes: bool) -> None:
    finding = check_errors([CompletedKill(victim, 0.5)], [request(0.0, 1.0, "503")])
    assert finding.holds is passes
    assert check_errors([CompletedKill(victim, 2.0)], [request(0.0, 1.0, "503")]).holds is False
