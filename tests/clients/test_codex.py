"""Tests of Codex in non-interactive mode, which supports only the Responses API."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.programs import Codex, items
from tests.clients.prompts import SUNNY, num_tokens, say
from tests.clients.sessions import SESSION, Session
from tests.clients.tools import RESULT, call

pytestmark = SESSION

ROUTE = "/v1/responses"


@pytest.fixture
def codex(session: Session, tmp_path: Path) -> Codex:
    return Codex(session.base_url, tmp_path / "project")


def test_a_turn_ends_with_its_text_and_the_next_turn_continues_the_session(
    codex: Codex, session: Session
) -> None:
    for words in ([say(SUNNY)], ["resume", "--last", say(SUNNY)]):
        code, events = codex(*words)
        assert code == 0, events
        assert [item["text"] for item in items(events, "agent_message")] == [SUNNY]
        assert events[-1]["type"] == "turn.completed"
        assert events[-1]["usage"]["output_tokens"] >= num_tokens(SUNNY)
    groups = session.groups(2)
    assert {group["route"] for group in groups} == {ROUTE}


def test_tools_run_and_the_turn_ends(codex: Codex, session: Session) -> None:
    (codex.folder / "notes.txt").write_text(RESULT)
    code, events = codex(call(("exec_command", {"cmd": "cat notes.txt"})))
    assert code == 0, events
    (ran,) = items(events, "command_execution")
    assert (ran["exit_code"], ran["status"]) == (0, "completed")
    assert [item["text"] for item in items(events, "agent_message")] == [SUNNY]
    _, second = session.groups(2)
    assert RESULT in second["request_json"]


def test_a_refusal_ends_the_turn(session: Session, tmp_path: Path) -> None:
    code, events = Codex(session.base_url, tmp_path / "project", "other")(say(SUNNY))
    assert code != 0
    assert events[-1]["type"] == "turn.failed"
    assert "other" in events[-1]["error"]["message"]
    session.refused(*[404] * 6)  # Codex retries five times after any refusal
