"""Codex without a user, over the Responses API, the only one it speaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.sessions import (
    KEY,
    MODEL,
    RESULT,
    SESSION,
    SUNNY,
    Session,
    call,
    npm_command,
    num_tokens,
    run,
    say,
)

pytestmark = SESSION

ROUTE = "/v1/responses"

CONFIG = """
model = "{model}"
model_provider = "fakevllm"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.fakevllm]
name = "fakevllm"
base_url = "{base_url}"
env_key = "FAKEVLLM_KEY"
wire_api = "responses"
"""


class Codex:
    def __init__(self, base_url: str, folder: Path, model: str = MODEL) -> None:
        self.folder = folder
        folder.mkdir()
        home = folder.parent / "codex"
        home.mkdir()
        (home / "config.toml").write_text(CONFIG.format(model=model, base_url=base_url))
        self._environment = {"CODEX_HOME": str(home), "FAKEVLLM_KEY": KEY}

    def __call__(self, *words: str) -> tuple[int, list[Any]]:
        """Exit code and events of one turn: `codex exec WORDS`."""
        command = [npm_command("codex"), "exec", "--skip-git-repo-check", "--json", *words]
        code, out, err = run(command, self.folder, self._environment)
        assert out, err
        return code, [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def codex(session: Session, tmp_path: Path) -> Codex:
    return Codex(session.base_url, tmp_path / "project")


def items(events: list[Any], kind: str) -> list[Any]:
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


def test_a_turn_ends_with_its_text_and_the_next_goes_on(codex: Codex, session: Session) -> None:
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
    session.refused(*[404] * 6)  # Codex asks five times again, whatever it is refused with
