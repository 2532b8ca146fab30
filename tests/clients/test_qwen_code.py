"""Tests of qwen-code in non-interactive mode: one turn, and a second turn of the session."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.programs import QwenCode
from tests.clients.prompts import SUNNY, say
from tests.clients.sessions import SESSION, Session

pytestmark = SESSION


@pytest.fixture
def qwen(session: Session, tmp_path: Path) -> QwenCode:
    return QwenCode(session.base_url, tmp_path / "project")


def test_a_turn_ends_with_its_text_and_the_next_turn_continues_the_session(
    qwen: QwenCode, session: Session
) -> None:
    for flags in ((), ("-c",)):
        code, out = qwen(f"{say(SUNNY)} please", *flags)
        assert code == 0 and out.strip() == SUNNY, out
    first, second = session.groups_of(f"{say(SUNNY)} please", 2)
    assert len(json.loads(second["request_json"])["messages"]) > len(
        json.loads(first["request_json"])["messages"]
    )
