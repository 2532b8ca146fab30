"""The web chat as a process, connected to any OpenAI-compatible server."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.e2e.processes import free_port, wait_until

ROOT = Path(__file__).parents[2]


@contextmanager
def running_webchat(model_url: str, folder: Path) -> Generator[str]:
    """Run the web chat and yield its URL. `model_url` is the model server's URL without `/v1`."""
    port = free_port()
    command = [sys.executable, "-m", "examples.webchat.app", "--port", str(port)]
    environment = os.environ | {"OPENAI_BASE_URL": f"{model_url}/v1", "OPENAI_API_KEY": "any"}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "webchat.log").open("w") as log:
        app = subprocess.Popen(
            [*command, "--file", str(folder / "webchat.sqlite")],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=log,
        )
    try:
        wait_until(lambda: _answers(f"http://127.0.0.1:{port}", app), 30, "the web chat")
        yield f"http://127.0.0.1:{port}"
    finally:
        app.terminate()
        app.wait(20)
        print((folder / "webchat.log").read_text())


def _answers(url: str, app: subprocess.Popen[bytes]) -> bool:
    assert app.poll() is None, "the web chat has ended"
    try:
        return httpx.get(f"{url}/api/chats").is_success
    except httpx.TransportError:
        return False
