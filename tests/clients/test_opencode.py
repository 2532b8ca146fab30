"""opencode without a user: one turn, a turn with a tool, and a second turn of the same session."""

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

NO_DOWNLOADS = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "SHARE")


class OpenCode:
    def __init__(self, base_url: str, folder: Path, model: str = MODEL) -> None:
        self.folder = folder
        self._environment = {
            "OPENCODE_CONFIG_CONTENT": json.dumps(settings(base_url, model)),
            **{f"OPENCODE_DISABLE_{name}": "1" for name in NO_DOWNLOADS},
        }

    def __call__(self, prompt: str, *flags: str) -> tuple[int, list[Any]]:
        """Exit code and events of one turn."""
        command = [npm_command("opencode"), "run", prompt, "--format", "json", *flags]
        code, out, err = run(command, self.folder, self._environment)
        assert out, err
        return code, [json.loads(line) for line in out.splitlines()]


def settings(base_url: str, name: str) -> dict[str, Any]:
    model = {"tool_call": True, "limit": {"context": 131072, "output": 8192}}
    return {
        "autoupdate": False,
        "share": "disabled",
        "model": f"fakevllm/{name}",
        "enabled_providers": ["fakevllm"],
        "permission": {"edit": "deny", "bash": "deny", "webfetch": "deny"},
        "provider": {
            "fakevllm": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": base_url, "apiKey": KEY},
                "models": {name: model},
            }
        },
    }


TITLED = ("--title", "T")
"""Without, opencode asks the model for a title, and does not wait for it."""


@pytest.fixture
def opencode(session: Session, tmp_path: Path) -> OpenCode:
    return OpenCode(session.base_url, tmp_path / "project")


def parts(events: list[Any], kind: str) -> list[Any]:
    return [event["part"] for event in events if event["type"] == kind]


def test_a_turn_ends_with_its_text_and_the_next_goes_on(
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
    # What has a space is put in quotes, and the quotes within escaped.
    code, events = opencode(read.replace(" ", "\n"), *TITLED)
    assert code == 0, events
    used = parts(events, "tool_use")
    assert [(part["tool"], part["state"]["status"]) for part in used] == [("read", "completed")] * 2
    assert len({part["callID"] for part in used}) == 2
    assert [part["text"] for part in parts(events, "text")] == ["Sunny."]
    assert [part["reason"] for part in parts(events, "step_finish")] == ["tool-calls", "stop"]
    _, second = session.groups(2)
    assert RESULT in second["request_json"]


def test_a_refusal_is_final(session: Session, tmp_path: Path) -> None:
    other = OpenCode(session.base_url, tmp_path / "project", "other")
    code, events = other("hi", *TITLED)
    assert code != 0
    assert [event["type"] for event in events] == ["error"]
    assert "The model `other` does not exist" in json.dumps(events)
    session.refused(404)
