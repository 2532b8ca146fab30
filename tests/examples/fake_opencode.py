"""A fake `opencode serve` that calls no model: every turn gets the reply from its arguments.

python -m tests.examples.fake_opencode '{"error": {...}}' serve
"""

from __future__ import annotations

import json
import shlex
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def write_command(folder: Path, info: dict[str, Any]) -> str:
    """Write the command into `folder` and return its path; `info` is the reply to each turn."""
    program = folder / "opencode"
    command = [sys.executable, str(Path(__file__)), json.dumps(info)]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    return str(program)


class Handler(BaseHTTPRequestHandler):
    """Handler for opencode's routes, and for a model server that lists one model."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        is_known = self.path in ("/global/health", "/v1/models")
        self._reply(200 if is_known else 404, {"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        info: dict[str, Any] = json.loads(sys.argv[1]) if "/message" in self.path else {}
        self._reply(200, {"id": "s", "info": info})

    def _reply(self, status: int, reply: dict[str, Any]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()
