"""opencode, unmodified, before a real proxy at N=2.

It is installed once by npm, into $FAKEVLLM_E2E_CACHE or pytest's cache folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]

PACKAGE = "opencode-ai@1.18.33"
INSTALL_TIMEOUT_S = 180.0
RUN_TIMEOUT_S = 90.0
ANSWER = "The answer is forty-two."

_NO_DOWNLOADS = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "SHARE")


@pytest.fixture(scope="module")
def opencode(request: pytest.FixtureRequest) -> Path:
    """The command, installed where it is missing."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    given = os.environ.get("FAKEVLLM_E2E_CACHE")
    cache = request.config.cache
    assert cache is not None
    folder = Path(given) if given else cache.mkdir("opencode")
    command = folder / "node_modules" / ".bin" / "opencode"
    if not command.exists():
        folder.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", PACKAGE]
        subprocess.run(install, check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True)
    return command


def test_opencode_gets_its_answer_through_the_proxy_at_two_siblings(
    opencode: Path, processes: Processes, yes_hooks: Path, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, "--hooks", str(yes_hooks), "--n", "2")

    code, out, err = run_opencode(opencode, proxy, tmp_path, f"[[say {ANSWER}]] please")

    assert code == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    texts = [event["part"]["text"] for event in events if event["type"] == "text"]
    assert texts == [ANSWER]
    finishes = [event["part"] for event in events if event["type"] == "step_finish"]
    assert [part["reason"] for part in finishes] == ["stop"]
    assert finishes[0]["tokens"]["output"] == len(ANSWER) + 1, "the fake counts bytes and an end"

    main = the_main_call(proxy)
    assert (main["streamed"], main["num_siblings"], main["status"]) == (1, 2, 200)
    siblings = rows(proxy, "select * from siblings where group_id = ?", main["group_id"])
    assert [sibling["text"] for sibling in siblings] == [ANSWER] * 2
    assert sum(sibling["served"] for sibling in siblings) == 1
    assert [sibling["reward"] for sibling in siblings] == [0.0, 0.0]


def the_main_call(proxy: Process) -> Any:
    """The one with tools: the title is made by a side call without, which opencode may drop."""
    groups = [
        group for group in wait_for_groups(proxy, 2) if "tools" in json.loads(group["request_json"])
    ]
    assert len(groups) == 1
    return groups[0]


def run_opencode(command: Path, proxy: Process, folder: Path, prompt: str) -> tuple[int, str, str]:
    """Exit code, standard output and error of one turn. Its home, its folder and its group of
    processes are its own."""
    home, project = folder / "home", folder / "project"
    home.mkdir()
    project.mkdir()
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OPENCODE_CONFIG_CONTENT": json.dumps(settings(proxy)),
        **{f"OPENCODE_DISABLE_{name}": "1" for name in _NO_DOWNLOADS},
    }
    running = subprocess.Popen(
        [str(command), "run", prompt, "--format", "json"],
        cwd=project,
        env=environment,
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


def settings(proxy: Process) -> dict[str, Any]:
    model = {"tool_call": True, "limit": {"context": 131072, "output": 8192}}
    return {
        "autoupdate": False,
        "share": "disabled",
        "model": "fakevllm/fake",
        "enabled_providers": ["fakevllm"],
        "permission": {"edit": "deny", "bash": "deny", "webfetch": "deny"},
        "provider": {
            "fakevllm": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{proxy.url}/v1", "apiKey": "sk-test"},
                "models": {"fake": model},
            }
        },
    }
