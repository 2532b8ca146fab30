"""Claude Code without a user, over Anthropic's messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.programs import ClaudeCode
from tests.clients.sessions import SESSION, Session
from tests.clients.tools import RESULT, call
from tests.clients.words import SUNNY, num_tokens, say

pytestmark = SESSION

ROUTE = "/v1/messages"


@pytest.fixture
def claude(session: Session, tmp_path: Path) -> ClaudeCode:
    return ClaudeCode(session.url, tmp_path / "project")


def test_a_turn_ends_with_its_text_and_the_next_goes_on(
    claude: ClaudeCode, session: Session
) -> None:
    for flags in ((), ("-c",)):
        code, told = claude(say(SUNNY), *flags)
        assert code == 0, told
        assert (told["result"], told["is_error"], told["num_turns"]) == (SUNNY, False, 1)
        assert told["usage"]["output_tokens"] == num_tokens(SUNNY)
        assert told["usage"]["input_tokens"] > 0
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
    code, told = claude(read)
    assert code == 0, told
    assert (told["result"], told["is_error"]) == (SUNNY, False)
    _, second = session.groups(2)
    assert RESULT in second["request_json"]


def test_a_refusal_is_final(claude: ClaudeCode, session: Session) -> None:
    code, told = claude("hi", "--model", "other")
    assert code != 0
    assert told["is_error"]
    assert "other" in told["result"]
    session.refused(404, 404)  # Claude Code asks once more without a stream, as of any server
