"""Tests of opencode in non-interactive mode: a turn, a turn with a tool, and a second turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.programs import TITLED, OpenCode, parts
from tests.clients.prompts import SUNNY, num_tokens, say
from tests.clients.sessions import SESSION, Session
from tests.clients.tools import RESULT, call

pytestmark = SESSION


@pytest.fixture
def opencode(session: Session, tmp_path: Path) -> OpenCode:
    return OpenCode(session.base_url, tmp_path / "project")


def test_a_turn_ends_with_its_text_and_the_next_turn_continues_the_session(
    opencode: OpenCode, session: Session
) -> None:
    for flags in (TITLED, ("-c",)):
        code, events = opencode(f"{say(SUNNY)} please", *flags)
        assert code == 0, events
        assert [part["text"] for part in parts(events, "text")] == [SUNNY]
        (finish,) = parts(events, "step_finish")
        assert finish["reason"] == "stop"
        assert finish["tokens"]["output"] == num_tokens(SUNNY)
    first, second = session.groups(2)
    assert len(json.loads(second["request_json"])["messages"]) > len(
        json.loads(first["request_json"])["messages"]
    )


def test_tools_run_and_the_turn_ends(opencode: OpenCode, session: Session) -> None:
    opencode.folder.mkdir()
    notes = [opencode.folder / name for name in ("one.txt", "two.txt")]
    for note in notes:
        note.write_text(RESULT)
    read = call(*[("read", {"filePath": str(note)}) for note in notes], then="Sunny.")
    # Arguments with a space are quoted, and their quotes are escaped.
    code, events = opencode(read.replace(" ", "\n"), *TITLED)
    assert code == 0, events
    used = parts(events, "tool_use")
    assert [(part["tool"], part["state"]["status"]) for part in used] == [("read", "completed")] * 2
    assert len({part["callID"] for part in used}) == 2
    assert [part["text"] for part in parts(events, "text")] == ["Sunny."]
    assert [part["reason"] for part in parts(events, "step_finish")] == ["tool-calls", "stop"]
    _, second = session.groups(2)
    assert RESULT in second["request_json"]


def test_an_unknown_model_ends_the_turn_with_an_error(session: Session, tmp_path: Path) -> None:
    other = OpenCode(session.base_url, tmp_path / "project", "other")
    code, events = other("hi", *TITLED)
    assert code != 0
    assert [event["type"] for event in events] == ["error"]
    assert "The model `other` does not exist" in json.dumps(events)
    session.refused(404)
