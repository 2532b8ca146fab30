"""Clients that are programs: command-line agents of npm, each with its own home directory.

The programs are in the folder that $FAKEVLLM_CLIENTS_NPM names, and are needed only when one runs.
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

from tests.clients.prompts import KEY, MODEL, Json

RUN_TIMEOUT_S = 240.0

TITLED = ("--title", "T")
"""Flags that set a title; otherwise opencode requests a title and does not wait for the answer."""
_NO_DOWNLOADS = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "SHARE")

APPS = Path(__file__).parents[2] / "adapters/apps"
"""The configurations of apps that users copy."""
SHIPPED_URL = "http://127.0.0.1:8000/v1"


class OpenCode:
    """opencode, which uses chat completions."""

    def __init__(
        self,
        base_url: str,
        folder: Path,
        model: str = MODEL,
        *,
        command: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the client.

        `command` replaces the program in $FAKEVLLM_CLIENTS_NPM. `options` are options of the model
        provider in opencode's configuration.
        """
        self.folder = folder
        self._command = command
        self._environment = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": KEY,
            "OPENCODE_CONFIG_CONTENT": json.dumps(_opencode_settings(model, options or {})),
            **{f"OPENCODE_DISABLE_{name}": "1" for name in _NO_DOWNLOADS},
        }

    def __call__(self, prompt: str, *flags: str) -> tuple[int, list[Any]]:
        """Run one turn, and return its exit code and events."""
        command = [self._command or npm_command("opencode"), "run", prompt, "--format", "json"]
        code, out, err = run([*command, *flags], self.folder, self._environment)
        assert out, err
        return code, [json.loads(line) for line in out.splitlines()]


def _opencode_settings(name: str, options: Mapping[str, Any]) -> Json:
    shipped: Json = json.loads((APPS / "opencode/opencode.json").read_text())
    provider = shipped["provider"]["fakevllm"]
    provider["options"] |= options
    provider["models"] = {name: provider["models"]["app-model"]}
    nothing = {"edit": "deny", "bash": "deny", "webfetch": "deny"}
    return shipped | {"model": f"fakevllm/{name}", "permission": nothing}


def parts(events: Sequence[Any], kind: str) -> list[Any]:
    """Return the parts of one type in opencode's events."""
    return [event["part"] for event in events if event["type"] == kind]


class Codex:
    """Codex, which supports only the Responses API."""

    def __init__(self, base_url: str, folder: Path, model: str = MODEL, **limits: int) -> None:
        """Create the client. `limits` are keys of the model provider's configuration."""
        self.folder = folder
        folder.mkdir()
        home = folder.parent / "codex"
        home.mkdir()
        shipped = (APPS / "codex/config.toml").read_text()
        config = shipped.replace("app-model", model).replace(SHIPPED_URL, base_url)
        config += "".join(f"{name} = {value}\n" for name, value in limits.items())
        allowed = 'approval_policy = "never"\nsandbox_mode = "danger-full-access"\n'
        (home / "config.toml").write_text(allowed + config)
        self._environment = {"CODEX_HOME": str(home), "OPENAI_API_KEY": KEY}

    def __call__(self, *words: str) -> tuple[int, list[Any]]:
        """Run `codex exec WORDS`, and return the turn's exit code and events."""
        command = [npm_command("codex"), "exec", "--skip-git-repo-check", "--json", *words]
        code, out, err = run(command, self.folder, self._environment)
        assert out, err
        return code, [json.loads(line) for line in out.splitlines()]


def items(events: Sequence[Any], kind: str) -> list[Any]:
    """Return the completed items of one type in Codex's events."""
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


class ClaudeCode:
    """Claude Code, which uses Anthropic's messages API."""

    def __init__(self, url: str, folder: Path, **environment: str) -> None:
        self.folder = folder
        own = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": KEY, "ANTHROPIC_MODEL": MODEL}
        self._environment = shipped_variables("claude-code") | own | environment

    def __call__(self, prompt: str, *flags: str) -> tuple[int, Any]:
        """Run one turn, and return its exit code and result."""
        command = [npm_command("claude"), "-p", prompt, "--output-format", "json"]
        command += ["--allowedTools", "Read", *flags]
        code, out, err = run(command, self.folder, self._environment)
        assert out, err
        return code, json.loads(out)


class QwenCode:
    """qwen-code, which uses chat completions."""

    def __init__(self, base_url: str, folder: Path) -> None:
        self.folder = folder
        settings = folder.parent / "home/.qwen/settings.json"
        settings.parent.mkdir(parents=True)
        settings.write_text((APPS / "qwen-code/settings.json").read_text())
        own = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": KEY, "OPENAI_MODEL": MODEL}
        self._environment = shipped_variables("qwen-code") | own

    def __call__(self, prompt: str, *flags: str) -> tuple[int, str]:
        """Run one turn, and return its exit code and answer."""
        command = [npm_command("qwen"), "-y", "-p", prompt, *flags]
        code, out, err = run(command, self.folder, self._environment)
        assert out, err
        return code, out


class Node:
    """OpenAI's official Node client, run by node_sessions.mjs."""

    _SCRIPT = Path(__file__).with_name("node_sessions.mjs")

    def __init__(self, base_url: str, folder: Path, **options: int) -> None:
        """Create the client with further options."""
        self._client = json.dumps({"baseURL": base_url, "apiKey": KEY, **options})
        self._folder = folder

    def __call__(self, name: str, **fields: Any) -> Any:
        """Run one session, and return `answer`, or `error`, `status` and `body`."""
        body = json.dumps({"model": MODEL, **fields})
        command = ["node", str(self._SCRIPT), name, self._client, body]
        environment = {"FAKEVLLM_CLIENTS_NPM": str(npm_folder())}
        code, out, err = run(command, self._folder, environment)
        assert code == 0, err
        return json.loads(out)

    def answer(self, name: str, **fields: Any) -> Any:
        result = self(name, **fields)
        assert "answer" in result, result
        return result["answer"]


def shipped_variables(app: str) -> dict[str, str]:
    """Return the variables in the app's .env file."""
    lines = (APPS / app / f"{app}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def npm_command(name: str) -> str:
    """Return the path of a program that npm installed."""
    return str(npm_folder() / "node_modules" / ".bin" / name)


def npm_folder() -> Path:
    folder = os.environ.get("FAKEVLLM_CLIENTS_NPM")
    assert folder, "FAKEVLLM_CLIENTS_NPM names no folder: start these tests by .ci/clients FOLDER"
    return Path(folder)


def run(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Run a program, and return its exit code, standard output and standard error.

    The program gets its own home directory beside `folder` and none of our environment variables.
    After a timeout it is killed together with its child processes.
    """
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
