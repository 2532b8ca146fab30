"""Tests of clients with a failing model server.

Each client must get an answer with a valid finish reason, or one error. It must never loop or hang,
and no request may be lost. Two proxies, with one sibling and with four, are in front of a faulty
swarm server. The timeouts of proxies and clients are shortened. The clients of OpenAI and Anthropic
meet each fault at both proxies. Other libraries and the programs meet each fault at one of the two
proxies, in alternation. Agents take seconds to start: each fault is met by one of them, in turns,
and by all of them in the tests marked `long`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.clients.fault_cases import CLIENTS, NUM_SIBLINGS, Case, CaseResult, CaseRuns, Setup
from tests.clients.faults import FAULTS, SAME_ID, TEXT, TOOL_FAULTS, TROUBLE, WELL
from tests.clients.faulty_swarm import FaultySwarm
from tests.clients.library_clients import WITH_TOOLS
from tests.clients.program_clients import AGENTS
from tests.clients.sessions import SESSION
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes, free_port

pytestmark = SESSION

VALID_ENDS = {"stop", "end_turn", "completed", "turn.completed"}
EARLY_S = 0.9
"""Latency in seconds below which a proxy can still send an error as an HTTP status."""
MIN_PAUSE_S = 1.0
"""Minimum pause of a client that retries forever; opencode's first pause is two seconds."""
NUM_AT_ONCE = 16
HEALING = ("429", "500", "503", "dropped at once")


NOT_APPLICABLE = {
    ("Node, chat gathered", "no role"): "its helper needs a role, and every vLLM sends one",
}


def all_cases() -> list[Any]:
    cases: list[Any] = []
    for at, (name, client) in enumerate(CLIENTS.items()):
        for turn, (fault_name, fault) in enumerate(FAULTS.items()):
            if fault.play(client.streamed) is None:
                continue
            alternating = NUM_SIBLINGS[(at + turn) % len(NUM_SIBLINGS)]
            is_failing = fault.expected_outcome(client.streamed) != WELL
            failing = 2 if client.retries_forever and is_failing else None
            cases += [
                pytest.param(Case(name, fault_name, number, failing), marks=marks_of(name, turn))
                for number in (NUM_SIBLINGS if client.is_official else [alternating])
            ]
    return cases


def marks_of(client: str, turn: int) -> list[pytest.MarkDecorator]:
    """Return the pytest marks for a case: the client, and the fault with this index in the
    table."""
    reason = NOT_APPLICABLE.get((client, list(FAULTS)[turn]))
    if reason is not None:
        return [pytest.mark.skip(reason)]
    if client in AGENTS and AGENTS.index(client) != turn % len(AGENTS):
        return [pytest.mark.long]
    return []


def one_per_client(fault: str, failing: int | None = None, *, is_away: bool = False) -> list[Case]:
    """Return a case for each client, with one or four siblings in alternation."""
    return [
        Case(name, fault, NUM_SIBLINGS[at % len(NUM_SIBLINGS)], failing, is_away=is_away)
        for at, name in enumerate(CLIENTS)
    ]


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CaseRuns]:
    """The runs of the selected cases."""
    folder = tmp_path_factory.mktemp("faults")
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    selected: list[Any] = [
        callspec.params.get("case") for callspec in parameters if callspec is not None
    ]
    cases = {case for case in selected if isinstance(case, Case)}
    with (
        ThreadPoolExecutor(NUM_AT_ONCE) as threads,
        FaultySwarm() as swarm,
        Processes(folder) as started,
    ):
        hooks = write_hooks(folder / "hooks", PREFER_YES)
        proxies = {number: proxy(started, swarm, hooks, number) for number in NUM_SIBLINGS}
        with FaultySwarm() as gone:
            without_server = {
                number: proxy(started, gone, hooks, number) for number in NUM_SIBLINGS
            }
        try:
            without_429s = proxy(started, swarm, hooks, 4)
            setup = Setup(swarm, proxies, without_server, without_429s, folder)
            yield CaseRuns(setup, cases, threads)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def proxy(started: Processes, swarm: FaultySwarm, hooks: Path, number: int) -> Process:
    port = free_port()
    own = started.folder / f"n{number}-{port}"
    own.mkdir()
    # Without a hold time, the proxy does not retry, so clients see the faults.
    (own / "fakevllm.toml").write_text("[upstream]\nhold_s = 0\n")
    command = ["-m", "tests.clients.short_timeouts", "serve", "--swarm", swarm.url, "--port"]
    command += [str(port), "--hooks", str(hooks), "--n", str(number), "--run-dir", str(own)]
    return started.adopt(Process("proxy", command, port, own)).wait_until_healthy()


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_a_client_gets_its_answer_or_an_error(case: Case, runs: CaseRuns) -> None:
    result = runs[case]
    outcome = FAULTS[case.fault].expected_outcome(case.streamed)
    if outcome == WELL:
        check_answer(result, num_requests=1)
    elif CLIENTS[case.client].retries_forever:
        check_heals(result, outcome)
    elif 400 <= outcome < 500 and outcome != 429:
        check_refusal(result, outcome)
    else:
        check_trouble(result)


def check_answer(result: CaseResult, num_requests: int) -> None:
    assert (result.outcome.text, result.outcome.error) == (TEXT, None)
    assert result.outcome.end in VALID_ENDS
    *failed, answered = result.rows
    assert len(result.rows) == num_requests
    assert all(row["state"] == "failed" for row in failed)
    assert (answered["status"], answered["text"]) == (200, TEXT)


def check_refusal(result: CaseResult, status: int) -> None:
    """Check that a refusal within `EARLY_S` is an HTTP status and is not retried."""
    assert result.outcome.error
    is_early = all(row["latency_s"] < EARLY_S for row in result.rows)
    client = CLIENTS[result.case.client]
    assert len(result.rows) <= (client.max_when_refused if is_early else client.max_requests)
    assert all(row["state"] == "failed" for row in result.rows)
    if is_early and client.reports_status:
        assert result.outcome.status == status
        is_engines = result.case.fault.isdigit()
        assert not is_engines or f"The engine says {status}." in result.outcome.error, (
            "the engine's own message"
        )


def check_trouble(result: CaseResult) -> None:
    assert result.outcome.error
    assert len(result.rows) <= CLIENTS[result.case.client].max_requests
    assert all(row["state"] == "failed" for row in result.rows)


def check_heals(result: CaseResult, outcome: int) -> None:
    """Check a client that retries forever: it pauses between attempts, and ends with the answer.

    The client does not retry a refusal, or an error that it takes for a refusal.
    """
    assert all(pause >= MIN_PAUSE_S for pause in result.pauses)
    if result.outcome.error:
        assert len(result.rows) == 1
        assert all(row["state"] == "failed" for row in result.rows)
        return
    assert result.case.failing is not None
    assert outcome in (TROUBLE, 429, 500, 503)
    check_answer(result, num_requests=result.case.failing + 1)


@pytest.mark.parametrize(
    "case", [case for fault in HEALING for case in one_per_client(fault, failing=1)], ids=str
)
def test_a_client_that_retries_is_answered_after_the_fault(case: Case, runs: CaseRuns) -> None:
    check_answer(runs[case], num_requests=2)


ONE_OF_FOUR = [
    Case(name, fault, 4, failing_siblings=1)
    for name, client in CLIENTS.items()
    for fault in ("dropped", "cut", "an error in the middle", "500")
    if client.is_official and FAULTS[fault].play(client.streamed) is not None
]


@pytest.mark.parametrize("case", ONE_OF_FOUR, ids=str)
def test_the_fault_of_one_of_several_siblings_is_hidden_from_the_client(
    case: Case, runs: CaseRuns
) -> None:
    check_answer(runs[case], num_requests=1)


@pytest.mark.parametrize(
    "case",
    [Case(name, fault, n) for name in WITH_TOOLS for fault in TOOL_FAULTS for n in NUM_SIBLINGS],
    ids=str,
)
def test_a_run_with_unusual_tool_calls_ends(case: Case, runs: CaseRuns) -> None:
    outcome, rows = runs[case].outcome, runs[case].rows
    if case.fault == SAME_ID:  # these clients refuse such calls from any server
        assert outcome.error or outcome.text == TEXT
        assert len(rows) <= 2
    else:
        assert (outcome.text, outcome.error) == (TEXT, None)
        assert len(rows) == 2
    assert all((row["state"] != "failed", row["status"]) == (True, 200) for row in rows)


@pytest.mark.parametrize("case", one_per_client("none", is_away=True), ids=str)
def test_without_a_server_a_client_gets_an_error(case: Case, runs: CaseRuns) -> None:
    if CLIENTS[case.client].retries_forever:
        pytest.skip("retries until the server is back")
    check_trouble(runs[case])
    assert {row["status"] for row in runs[case].rows} == {503}
