"""A gateway between a client and its server."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from fakevllm import SwarmClient, Task, WorkflowOutput

PAGE = b"<html><head><title>502 Bad Gateway</title></head>\xff</html>"


class Gateway(BaseHTTPRequestHandler):
    """Before a server that it reaches each second time."""

    num_asked = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        Gateway.num_asked += 1
        is_reached = Gateway.num_asked % 2 == 0
        self.send_response(200 if is_reached else 502)
        self.end_headers()
        self.wfile.write(b'{"success": true}' if is_reached else PAGE)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_an_end_outlasts_a_gateway_that_answers_with_a_page() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        thread = Thread(target=gateway.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{gateway.server_port}"
        with SwarmClient(url, verbose=False) as client:
            client.end_episode(Task(task_id="t"), "u1", WorkflowOutput(reward=1.0))
        gateway.shutdown()
        thread.join()
    assert Gateway.num_asked == 2
