"""A server that receives alerts on a free port of this machine."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

HANG_S = 60.0


class AlertReceiver:
    """A server that keeps all alerts. It answers with the statuses in `statuses`, one after the
    other, and with 204 from then on. With `hangs`, it answers nobody until `release` is called."""

    def __init__(self, *statuses: int, hangs: bool = False) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self._statuses = list(statuses)
        self._may_answer = threading.Event()
        if not hangs:
            self._may_answer.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver.headers.append(dict(self.headers.items()))
                receiver.bodies.append(self.rfile.read(int(self.headers["content-length"])))
                receiver._may_answer.wait(HANG_S)
                status = receiver._statuses.pop(0) if receiver._statuses else 204
                self.send_response(status)
                if 300 <= status < 400:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Write nothing: the tests look at the requests."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """Write nothing: a sender that gives up closes its connection."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/hook/secret-path"

    @property
    def alerts(self) -> list[dict[str, Any]]:
        """The alerts that have arrived."""
        return [json.loads(body) for body in self.bodies]

    def release(self) -> None:
        """Let the server answer."""
        self._may_answer.set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.release()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
