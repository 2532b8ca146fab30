"""Clients that are programs: npm's command-line agents, each with a home of its own.

Nothing here is imported by them or needs them before one runs: they are in the folder that
$FAKEVLLM_CLIENTS_NPM names.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.clients.words import KEY, MODEL, Json

RUN_TIMEOUT_S = 240.0

TITLED = ("--title", "T")
"""Without, opencode asks the model for a title, and does not wait for it."""
_NO_DOWNLOADS = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "SHARE")

_CODEX_CONFIG = """
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


class OpenCode:
    """Over chat completions."""

    def __init__(
        self,
        base_url: str,
        folder: Path,
        model: str = MODEL,
        *,
        command: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """`command` where it is not npm's of $FAKEVLLM_CLIENTS_NPM; `options` of the provider."""
        self.folder = folder
        self._command = command
        given = {"baseURL": base_url, "apiKey": KEY, **(options or {})}
        self._environment = {
            "OPENCODE_CONFIG_CONTENT": json.dumps(_opencode_settings(model, given)),
            **{f"OPENCODE_DISABLE_{name}": "1" for name in _NO_DOWNLOADS},
        }

    def __call__(self, prompt: str, *flags: str) -> tuple[int, list[Any]]:
        """Exit code and events of one turn."""
        command = [self._command or npm_command("opencode"), "run", prompt, "--format", "json"]
        code, out, err = run([*command, *flags], self.folder, self._environment)
        assert out, err
        return code, [json.loads(line) for line in out.splitlines()]


def _opencode_settings(name: str, options: Mapping[str, Any]) -> Json:
    model = {"tool_call": True, "limit": {"context": 131072, "output": 8192}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": dict(options),
        "models": {name: model},
    }
    return {
        "autoupdate": False,
        "share": "disabled",
        "model": f"fakevllm/{name}",
        "enabled_providers": ["fakevllm"],
        "permission": {"edit": "deny", "bash": "deny", "webfetch": "deny"},
        "provider": {"fakevllm": provider},
    }


def parts(events: Sequence[Any], kind: str) -> list[Any]:
    """Of opencode's events."""
    return [event["part"] for event in events if event["type"] == kind]


class Codex:
    """Over the Responses API, the only one it speaks."""

    def __init__(self, base_url: str, folder: Path, model: str = MODEL, **limits: int) -> None:
        """`limits` of the provider, as its configuration names them."""
        self.folder = folder
        folder.mkdir()
        home = folder.parent / "codex"
        home.mkdir()
        config = _CODEX_CONFIG.format(model=model, base_url=base_url)
        config += "".join(f"{name} = {value}\n" for name, value in limits.items())
        (home / "config.toml").write_text(config)
        self._environment = {"CODEX_HOME": str(home), "FAKEVLLM_KEY": KEY}

    def __call__(self, *words: str) -> tuple[int, list[Any]]:
        """Exit code and events of one turn: `codex exec WORDS`."""
        command = [npm_command("codex"), "exec", "--skip-git-repo-check", "--json", *words]
        code, out, err = run(command, self.folder, self._environment)
        assert out, err
        return code, [json.loads(line) for line in out.splitlines()]


def items(events: Sequence[Any], kind: str) -> list[Any]:
    """Of Codex' events."""
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


class ClaudeCode:
    """Over Anthropic's messages."""

    def __init__(self, url: str, folder: Path, **environment: str) -> None:
        self.folder = folder
        self._environment = {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            **environment,
        }

    def __call__(self, prompt: str, *flags: str) -> tuple[int, Any]:
        """Exit code and result of one turn."""
        command = [npm_command("claude"), "-p", prompt, "--output-format", "json"]
        command += ["--allowedTools", "Read", *flags]
        code, out, err = run(command, self.folder, self._environment)
        assert out, err
        return code, json.loads(out)


class Node:
    """OpenAI's official Node client: one session of node_sessions.mjs."""

    _SCRIPT = Path(__file__).with_name("node_sessions.mjs")

    def __init__(self, base_url: str, folder: Path, **options: int) -> None:
        """`options` of the client."""
        self._client = json.dumps({"baseURL": base_url, "apiKey": KEY, **options})
        self._folder = folder

    def __call__(self, name: str, **fields: Any) -> Any:
        """What the script printed: `answer`, or `error`, `status` and `body`."""
        asked = json.dumps({"model": MODEL, **fields})
        command = ["node", str(self._SCRIPT), name, self._client, asked]
        environment = {"FAKEVLLM_CLIENTS_NPM": str(npm_folder())}
        code, out, err = run(command, self._folder, environment)
        assert code == 0, err
        return json.loads(out)

    def answer(self, name: str, **fields: Any) -> Any:
        told = self(name, **fields)
        assert "answer" in told, told
        return told["answer"]


def npm_command(name: str) -> str:
    """A program that npm installed."""
    return str(npm_folder() / "node_modules" / ".bin" / name)


def npm_folder() -> Path:
    folder = os.environ.get("FAKEVLLM_CLIENTS_NPM")
    assert folder, "FAKEVLLM_CLIENTS_NPM names no folder: start these tests by .ci/clients FOLDER"
    return Path(folder)


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, standard output and error. The program, and all it starts, has a home of its own
    beside `folder`, none of our environment, and an end."""
    home = folder.parent / "home"
    for needed in (home, folder):
        needed.mkdir(parents=True, exist_ok=True)
    running = subprocess.Popen(
        command,
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with running:
        try:
            out, err = running.communicate(timeout=RUN_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    return running.returncode, out, err
