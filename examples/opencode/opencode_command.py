"""The command `opencode`: its path, its environment, and a recording of its request."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

Json = dict[str, Any]

CONFIG = Path(__file__).parent / "small/opencode.json"
PACKAGE = "opencode-ai@1.18.33"
QUESTION = "What is 1 plus 1? Write the number to answer.txt"
TIMEOUT_S = 120.0
DISABLED_FEATURES = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "SHARE")
XDG_FOLDERS = ("CONFIG", "DATA", "STATE", "CACHE")


def record_request(opencode: str) -> Json:
    """Return the body of the first request that opencode sends to its model.

    `opencode` is the command. Raises RuntimeError if it sends no request.
    """
    bodies: list[Json] = []

    class Recorder(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_error(400, "recorded")  # opencode does not retry after this status

        def log_message(self, format: str, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Recorder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        with tempfile.TemporaryDirectory() as folder:
            run_opencode(opencode, Path(folder), url, "any", QUESTION)
        server.shutdown()
    if not bodies:
        raise RuntimeError(f"{opencode} sent no request: does `{opencode} run hi` work?")
    return bodies[0]


def run_opencode(
    opencode: str, workspace: Path, url: str, key: str, question: str
) -> subprocess.CompletedProcess[str]:
    """Play one turn with `opencode run`, without a terminal."""
    command = [opencode, "run", "--title", "T", "--format", "json", question]
    return subprocess.run(
        command,
        cwd=workspace,
        env=environment(workspace, url, key),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def locate_command(opencode: str) -> str:
    """Return the absolute path of the command. Raises SystemExit if it is not installed."""
    path = shutil.which(opencode)
    if path is None:
        raise SystemExit(
            f"The command {opencode} was not found: npm install -g {PACKAGE}, or --opencode PATH."
        )
    return str(Path(path).absolute())


def environment(workspace: Path, url: str, key: str) -> dict[str, str]:
    """Return the environment of an opencode that uses none of the user's settings and sessions.

    It has the small agent's configuration, and its home folder is inside the workspace.
    """
    settings = {f"OPENCODE_DISABLE_{name}": "1" for name in DISABLED_FEATURES}
    settings |= {
        f"XDG_{name}_HOME": str(workspace / ".home" / name.lower()) for name in XDG_FOLDERS
    }
    settings |= {"OPENCODE_CONFIG": str(CONFIG), "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    return dict(os.environ) | settings | {"PWD": str(workspace)}  # opencode works in $PWD
