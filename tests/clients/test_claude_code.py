"""Tests of Claude Code in non-interactive mode, which uses Anthropic's messages API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.programs import ClaudeCode
from tests.clients.prompts import SUNNY, num_tokens, say
from tests.clients.sessions import SESSION, Session
from tests.clients.tools import RESULT, call

pytestmark = SESSION

ROUTE = "/v1/messages"


@pytest.fixture
def claude(session: Session, tmp_path: Path) -> ClaudeCode:
    return ClaudeCode(session.url, tmp_path / "project")


def test_a_turn_ends_with_its_text_and_the_next_turn_continues_the_session(
    claude: ClaudeCode, session: Session
) -> None:
    for flags in ((), ("-c",)):
        code, result = claude(say(SUNNY), *flags)
        assert code == 0, result
        assert (result["result"], result["is_error"], result["num_turns"]) == (SUNNY, False, 1)
        assert result["usage"]["output_tokens"] == num_tokens(SUNNY)
        assert result["usage"]["input_tokens"] > 0
    groups = session.groups(2)
    assert {group["route"] for group in groups} == {ROUTE}
    first, second = (json.loads(group["request_json"])["messages"] for group in groups)
    assert len(second) > len(first)


def test_tools_run_and_the_turn_ends(claude: ClaudeCode, session: Session) -> None:
    claude.folder.mkdir()
    notes = [claude.folder / name for name in ("one.txt", "two.txt")]
    for note in notes:
        note.write_text(RESULT)
    read = call(*[("Read", {"file_path": str(note)}) for note in notes])
    code, result = claude(read)
    assert code == 0, result
    assert (result["result"], result["is_error"]) == (SUNNY, False)
    _, second = session.groups(2)
    assert RESULT in second["request_json"]


def test_an_unknown_model_ends_the_turn_with_an_error(claude: ClaudeCode, session: Session) -> None:
    code, result = claude("hi", "--model", "other")
    assert code != 0
    assert result["is_error"]
    assert "other" in result["result"]
    session.refused(404, 404)  # Claude Code retries once without streaming, with any server
