"""What the small agent really sends: one request of opencode's, taken by a server that is none."""

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
QUIET = ("MODELS_FETCH", "AUTOUPDATE", "LSP_DOWNLOAD", "SHARE")
HOMES = ("CONFIG", "DATA", "STATE", "CACHE")


def record_request(opencode: str) -> Json:
    """The body of its first call: `messages` and `tools` are what the model sees. `opencode` is
    the command. Raises RuntimeError where it sends none."""
    bodies: list[Json] = []

    class Recorder(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_error(400, "recorded")  # final: it does not ask again

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
    """One turn, headless: `opencode run`."""
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


def found(opencode: str) -> str:
    """Where the command is, from any folder. Raises SystemExit, with what installs it."""
    path = shutil.which(opencode)
    if path is None:
        raise SystemExit(f"There is no {opencode}: npm install -g {PACKAGE}, or --opencode PATH.")
    return str(Path(path).absolute())


def environment(workspace: Path, url: str, key: str) -> dict[str, str]:
    """Apart from the user's own settings and sessions: the small agent's configuration, and a home
    that goes with the workspace."""
    quiet = {f"OPENCODE_DISABLE_{name}": "1" for name in QUIET}
    quiet |= {f"XDG_{name}_HOME": str(workspace / ".home" / name.lower()) for name in HOMES}
    own = {"OPENCODE_CONFIG": str(CONFIG), "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
    return dict(os.environ) | quiet | own | {"PWD": str(workspace)}  # it believes PWD
