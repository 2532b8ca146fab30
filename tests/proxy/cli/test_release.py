"""`fakevllm release` shows the history of releases, and sends operators' decisions."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from fakevllm.cli.main import app
from fakevllm_adapters.protocol.releases import (
    Decision,
    ReleaseRecord,
    ReleaseReply,
    ReleasesReply,
)
from tests.proxy.scripted_swarm import ScriptedSwarm

REJECTION = ReleaseRecord(
    number=2,
    id="gate-20-rejected-1",
    decision=Decision.REJECTED,
    version=20,
    parent=0,
    time_s=1_700_000_000.0,
    decided_by="gate",
    evidence={"difference": -0.125, "low": -0.2, "high": -0.06, "pairs": 96, "restored": 10},
)
HISTORY = ReleasesReply(
    records=[REJECTION], released=10, candidate=None, rejected=[20, 21, 22], is_held=True
)


@contextmanager
def serving(**answers: Any) -> Generator[ScriptedSwarm]:
    """Run a scripted server in a thread. `answers` are its replies by path without the slash."""
    loop = asyncio.new_event_loop()
    swarm = ScriptedSwarm()
    swarm.answers = {f"/{path}": answer for path, answer in answers.items()}
    started = threading.Event()

    async def serve() -> None:
        async with swarm:
            started.set()
            await stop.wait()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(10)
        yield swarm
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def run(swarm: ScriptedSwarm, *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["release", *arguments, "--swarm", swarm.url])
    return result.exit_code, result.output


def test_status_shows_the_released_version_the_rejected_ones_and_a_hold() -> None:
    with serving(releases=HISTORY) as swarm:
        code, output = run(swarm, "status")
    assert code == 0
    for text in ("version 10", "20 to 22", "fakevllm release resume", "-0.125"):
        assert text in output


def test_status_and_history_print_json() -> None:
    with serving(releases=HISTORY) as swarm:
        _, status = run(swarm, "status", "--json")
        _, history = run(swarm, "history", "--json")
    assert json.loads(status) == {
        "released": 10,
        "candidate": None,
        "rejected": [20, 21, 22],
        "is_held": True,
        "run_id": None,
        "latest": REJECTION.model_dump(mode="json"),
        "training_limit": None,
        "released_copies": [],
        "newest_copies": [],
        "with_weights": [],
    }
    assert json.loads(history) == [REJECTION.model_dump(mode="json")]


def test_history_lists_each_decision_with_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    with serving(releases=HISTORY) as swarm:
        code, output = run(swarm, "history")
    assert code == 0
    for text in ("rejected", "gate", "-0.125 (-0.200 to -0.060)", "96"):
        assert text in output


def test_promote_sends_the_version_and_whether_it_is_forced() -> None:
    record = REJECTION.model_copy(update={"decision": Decision.RELEASED, "number": 3})
    reply = ReleaseReply(success=True, record=record)
    with serving(releases=HISTORY, release=reply) as swarm:
        code, output = run(swarm, "promote", "20", "--force")
        body = swarm.bodies["/release"]
    assert code == 0
    assert "Version 20 is released" in output
    assert (body["decision"], body["version"], body["force"]) == ("released", 20, True)
    assert body["run_id"] is None  # the server has not named its run
    assert body["id"].startswith("operator-")


@pytest.mark.parametrize(("command", "decision"), [("hold", "hold"), ("resume", "resume")])
def test_a_hold_and_its_end_are_decisions_without_a_version(command: str, decision: str) -> None:
    reply = ReleaseReply(success=True, record=REJECTION)
    with serving(releases=HISTORY, release=reply) as swarm:
        code, _ = run(swarm, command)
        body = swarm.bodies["/release"]
    assert code == 0
    assert (body["decision"], body["version"]) == (decision, None)


def test_a_rollback_names_the_version_to_which_training_goes_back() -> None:
    reply = ReleaseReply(success=True, record=REJECTION)
    history = HISTORY.model_copy(update={"run_id": "run-a"})
    with serving(releases=history, rollback=reply) as swarm:
        code, output = run(swarm, "rollback", "10")
        body = swarm.bodies["/rollback"]
        run(swarm, "rollback")
        default = swarm.bodies["/rollback"]
    assert code == 0
    assert "from version 10" in output
    assert (body["version"], default["version"]) == (10, None)
    assert body["run_id"] == default["run_id"] == "run-a"
    assert body["id"] != default["id"]


def test_a_rollback_says_which_version_answers_apps_now() -> None:
    evidence = {"restored": 4}
    record = REJECTION.model_copy(update={"evidence": evidence, "version": 5})
    reply = ReleaseReply(success=True, record=record)
    history = HISTORY.model_copy(update={"released": 0})
    with serving(releases=history, rollback=reply) as swarm:
        _, output = run(swarm, "rollback", "4")
    assert "version 0 is released now, not version 4" in output
    assert "Version 5 and all that were trained from it are rejected" in output
    with serving(releases=HISTORY, rollback=ReleaseReply(success=True, record=REJECTION)) as swarm:
        _, output = run(swarm, "rollback", "10")
    assert "version 10 is released now." in output


def test_a_rollback_to_a_version_that_training_had_left_names_no_first_version() -> None:
    record = REJECTION.model_copy(update={"evidence": {"restored": 4}, "version": None})
    reply = ReleaseReply(success=True, record=record)
    with serving(releases=HISTORY, rollback=reply) as swarm:
        code, output = run(swarm, "rollback", "4")
    assert code == 0
    assert "None" not in output
    assert "All versions that were trained from version 4 are rejected" in output


def test_a_refusal_is_one_line_with_the_servers_reason() -> None:
    refusal = ReleaseReply(success=False, failure_reason="Version 20 was rejected: name another.")
    with serving(releases=HISTORY, release=refusal) as swarm:
        code, output = run(swarm, "promote", "20")
    assert code == 2
    assert output.strip() == "fakevllm: Version 20 was rejected: name another."


@pytest.mark.parametrize(
    ("status", "advice"),
    [(401, "--swarm-key"), (403, "admin's key"), (404, "update fakevllm-server")],
)
def test_an_error_of_the_server_says_what_to_do(status: int, advice: str) -> None:
    with serving(releases=status) as swarm:
        code, output = run(swarm, "status")
    assert code == 2
    assert advice in output
    assert len(output.strip().splitlines()) == 1


def test_without_a_server_a_decision_fails_at_once_and_names_the_command_that_starts_one() -> None:
    with serving() as swarm:
        pass
    code, output = run(swarm, "promote", "3")
    assert code == 2
    assert "fakevllm-server start" in output
