"""What clients make of a model server that fails: an answer with a valid end, or one error; never a
loop, a hang or a lost request.

A faulty swarm server stands behind two proxies, of one sibling and of four with a hook. The clocks
of proxies and clients are shortened. OpenAI's and Anthropic's own clients meet each fault at both;
what is built on them, and the programs, at one or the other in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.clients.asking_libraries import WITH_TOOLS
from tests.clients.fault_cases import CLIENTS, NUM_SIBLINGS, Case, Ran, Runs, Stage
from tests.clients.faults import FAULTS, SAME_ID, TEXT, TOOL_FAULTS, TROUBLE, WELL
from tests.clients.faulty_swarm import FaultySwarm
from tests.clients.sessions import SESSION
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes, free_port

pytestmark = SESSION

VALID_ENDS = {"stop", "end_turn", "completed", "turn.completed"}
EARLY_S = 0.9
"""Below the proxies' patience: an error can still be a status."""
LEAST_PAUSE_S = 1.0
"""Of a client that asks again without end; opencode's first is two seconds."""
NUM_AT_ONCE = 16
HEALING = ("429", "500", "503", "dropped at once")


NOT_APPLICABLE = {
    ("Node, chat gathered", "no role"): "its helper wants one, and every vLLM sends one",
}


def everything() -> list[Any]:
    cases: list[Case] = []
    for at, (name, client) in enumerate(CLIENTS.items()):
        for turn, (fault, found) in enumerate(FAULTS.items()):
            if found.play(client.streamed) is None:
                continue
            one = NUM_SIBLINGS[(at + turn) % len(NUM_SIBLINGS)]
            is_failing = found.comes_to(client.streamed) != WELL
            failing = 2 if client.is_endless and is_failing else None
            cases += [
                Case(name, fault, number, failing)
                for number in (NUM_SIBLINGS if client.is_official else [one])
            ]
    return [pytest.param(case, marks=marks_of(case)) for case in cases]


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    reason = NOT_APPLICABLE.get((case.client, case.fault))
    if reason is not None:
        return [pytest.mark.skip(reason)]
    return []


def in_turn(fault: str, failing: int | None = None, *, is_away: bool = False) -> list[Case]:
    """For every client, at one number of siblings or the other."""
    return [
        Case(name, fault, NUM_SIBLINGS[at % len(NUM_SIBLINGS)], failing, is_away=is_away)
        for at, name in enumerate(CLIENTS)
    ]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runs]:
    """Of the cases that were chosen."""
    folder = tmp_path_factory.mktemp("faults")
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    chosen: list[Any] = [found.params.get("case") for found in parameters if found is not None]
    cases = {case for case in chosen if isinstance(case, Case)}
    with (
        ThreadPoolExecutor(NUM_AT_ONCE) as threads,
        FaultySwarm() as swarm,
        Processes(folder) as started,
    ):
        hooks = write_hooks(folder / "hooks", PREFER_YES)
        proxies = {number: proxy(started, swarm, hooks, number) for number in NUM_SIBLINGS}
        with FaultySwarm() as gone:
            lonely = {number: proxy(started, gone, hooks, number) for number in NUM_SIBLINGS}
        try:
            spared = proxy(started, swarm, hooks, 4)
            yield Runs(Stage(swarm, proxies, lonely, spared, folder), cases, threads)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def proxy(started: Processes, swarm: FaultySwarm, hooks: Path, number: int) -> Process:
    port = free_port()
    own = started.folder / f"n{number}-{port}"
    own.mkdir()
    # What the proxy would mend itself, clients would not see.
    (own / "fakevllm.toml").write_text("[upstream]\nhold_s = 0\n")
    command = ["-m", "tests.clients.short_clocks", "serve", "--swarm", swarm.url, "--port"]
    command += [str(port), "--hooks", str(hooks), "--n", str(number), "--run-dir", str(own)]
    return started.adopt(Process("proxy", command, port, own)).wait_until_healthy()


@pytest.mark.parametrize("case", everything(), ids=str)
def test_a_client_gets_its_answer_or_an_error(case: Case, runs: Runs) -> None:
    ran = runs[case]
    outcome = FAULTS[case.fault].comes_to(case.streamed)
    if outcome == WELL:
        check_answer(ran, num_requests=1)
    elif CLIENTS[case.client].is_endless:
        check_heals(ran, outcome)
    elif 400 <= outcome < 500 and outcome != 429:
        check_refusal(ran, outcome)
    else:
        check_trouble(ran)


def check_answer(ran: Ran, num_requests: int) -> None:
    assert (ran.told.text, ran.told.error) == (TEXT, None)
    assert ran.told.end in VALID_ENDS
    *failed, answered = ran.rows
    assert len(ran.rows) == num_requests
    assert all(row["state"] == "failed" for row in failed)
    assert (answered["status"], answered["text"]) == (200, TEXT)


def check_refusal(ran: Ran, status: int) -> None:
    """Known in time it is a status, and final."""
    assert ran.told.error
    is_early = all(row["latency_s"] < EARLY_S for row in ran.rows)
    client = CLIENTS[ran.case.client]
    assert len(ran.rows) <= (client.most_when_refused if is_early else client.most_requests)
    assert all(row["state"] == "failed" for row in ran.rows)
    if is_early and client.tells_status:
        assert ran.told.status == status
        is_engines = ran.case.fault.isdigit()
        assert not is_engines or f"The engine says {status}." in ran.told.error, "its own words"


def check_trouble(ran: Ran) -> None:
    assert ran.told.error
    assert len(ran.rows) <= CLIENTS[ran.case.client].most_requests
    assert all(row["state"] == "failed" for row in ran.rows)


def check_heals(ran: Ran, outcome: int) -> None:
    """A client without end asks until it is answered, but never in haste; a refusal is final, and
    so is an error it takes for one."""
    assert all(pause >= LEAST_PAUSE_S for pause in ran.pauses)
    if ran.told.error:
        assert len(ran.rows) == 1
        assert all(row["state"] == "failed" for row in ran.rows)
        return
    assert ran.case.failing is not None
    assert outcome in (TROUBLE, 429, 500, 503)
    check_answer(ran, num_requests=ran.case.failing + 1)


@pytest.mark.parametrize(
    "case", [case for fault in HEALING for case in in_turn(fault, failing=1)], ids=str
)
def test_a_client_that_asks_again_is_answered_once_the_fault_is_over(
    case: Case, runs: Runs
) -> None:
    check_answer(runs[case], num_requests=2)


ONE_OF_FOUR = [
    Case(name, fault, 4, failing_siblings=1)
    for name, client in CLIENTS.items()
    for fault in ("dropped", "cut", "an error in the middle", "500")
    if client.is_official and FAULTS[fault].play(client.streamed) is not None
]


@pytest.mark.parametrize("case", ONE_OF_FOUR, ids=str)
def test_what_one_of_several_siblings_suffers_is_not_seen(case: Case, runs: Runs) -> None:
    check_answer(runs[case], num_requests=1)


@pytest.mark.parametrize(
    "case",
    [Case(name, fault, n) for name in WITH_TOOLS for fault in TOOL_FAULTS for n in NUM_SIBLINGS],
    ids=str,
)
def test_a_run_with_odd_tool_calls_ends(case: Case, runs: Runs) -> None:
    told, rows = runs[case].told, runs[case].rows
    if case.fault == SAME_ID:  # these clients refuse such calls, whoever made them
        assert told.error or told.text == TEXT
        assert len(rows) <= 2
    else:
        assert (told.text, told.error) == (TEXT, None)
        assert len(rows) == 2
    assert all((row["state"] != "failed", row["status"]) == (True, 200) for row in rows)


@pytest.mark.parametrize("case", in_turn("none", is_away=True), ids=str)
def test_a_server_that_is_away_is_an_error(case: Case, runs: Runs) -> None:
    if CLIENTS[case.client].is_endless:
        pytest.skip("asks until the server is back")
    check_trouble(runs[case])
    assert {row["status"] for row in runs[case].rows} == {503}
