"""What the page Now calls a problem, for the statistics that a real proxy sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakevllm.console.problems import find_problems
from tests.proxy.web.test_stats import open_client

FINE: dict[str, Any] = {"engine": {"engine_status": "ENGINE.ROLLING"}, "has_hooks": True}


def engine_with(**totals: float) -> dict[str, Any]:
    return {"engine": {"engine_status": "ENGINE.ROLLING", "totals": totals}}


def failures(num_failed: int, num_groups: int) -> dict[str, Any]:
    reason = "hook_raised: KeyError (mine.py:2)"
    return {"num_failed": num_failed, "num_groups": num_groups, "reason": reason}


def alarm(*, is_pending: bool) -> dict[str, Any]:
    return {
        "detector": "refusals",
        "step": 7,
        "version": 8,
        "message": "refusals: 50% refuse",
        "remedy": "Read some groups.",
        "action": "hold",
        "is_pending": is_pending,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"engine": None}, ["cannot reach the swarm server"]),
        ({"engine": {"engine_status": "ENGINE.OFFLINE"}}, ["engine is not started"]),
        (
            {"engine": {"engine_status": "ENGINE.BOOTING", "engine_status_detail": "loads x"}},
            ["engine is starting, so requests wait or are answered with status 503. loads x"],
        ),
        (engine_with(groups=60, groups_with_signal=5), ["55 had equal rewards"]),
        (engine_with(groups=60, groups_with_signal=6), []),
        (engine_with(groups=49, groups_with_signal=0), []),
        ({"paused": True}, ["Training is paused"]),
        ({"has_hooks": False}, ["no hooks"]),
        (
            {"hook_failures": failures(25, 50)},
            ["failed for 25 of the latest 50 groups", "KeyError"],
        ),
        ({"hook_failures": failures(1, 1)}, ["failed for 1 of 1 group,"]),
        ({"hook_failures": failures(24, 50)}, []),
        ({"hook_failures": None}, []),
        ({"hooks_changed": "The hook files changed on disk"}, ["changed on disk"]),
        (
            {"ledger_error": "disk full", "ledger_dropped": 3},
            ["cannot write its ledger"],
        ),
        ({"ledger_dropped": 3}, ["3 writes to the ledger failed"]),
        ({"release": {"trouble": "no rows", "is_held": True}}, ["no rows", "on hold"]),
        ({"guard": {"alarms": [], "trouble": "the server is away"}}, []),
        ({"guard": {"alarms": [alarm(is_pending=False)]}}, ["since step 7, refusals: 50% refuse"]),
        (
            {"guard": {"alarms": [alarm(is_pending=True)], "trouble": "no admin's key"}},
            ["refusals: 50% refuse", "cannot carry out the action of an alarm: no admin's key"],
        ),
        ({"privacy": {"unsent": 1, "trouble": "full"}}, ["contents of 1 group", "full"]),
        ({"arms": {"trouble": {"baseline": "no memory"}}}, ["baseline arm", "no memory"]),
    ],
)
def test_each_trouble_is_one_problem(change: dict[str, Any], words: list[str]) -> None:
    problems = find_problems(FINE | change)
    texts = [problem.text for problem in problems]
    assert len(texts) >= bool(words) and (words or texts == [])
    for word in words:
        assert any(word in text for text in texts), (word, texts)


@pytest.mark.parametrize(
    ("change", "page"),
    [
        ({"paused": True}, "/training"),
        ({"release": {"is_held": True}}, "/releases/hold"),
        ({"hooks_changed": "The hook files changed on disk"}, "/hooks"),
        (engine_with(groups=60, groups_with_signal=0), "/groups"),
        ({"ledger_dropped": 3}, ""),
    ],
)
def test_a_problem_names_the_page_on_which_it_is_solved(change: dict[str, Any], page: str) -> None:
    (problem,) = find_problems(FINE | change)
    assert (problem.page, bool(problem.page_name)) == (page, bool(page))


async def test_a_proxy_without_hooks_and_server_has_these_problems(tmp_path: Path) -> None:
    async with open_client(tmp_path) as (_, client):
        stats = (await client.get("/fakevllm/stats")).json()
    texts = [problem.text for problem in find_problems(stats)]
    assert any("no hooks" in text for text in texts)
