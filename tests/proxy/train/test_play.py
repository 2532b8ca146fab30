"""How the command's play gets at its engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from fakevllm import ServerUnreachable, Task, TrainJob
from fakevllm.train.play import Material, Play
from fakevllm.train.screen import Screen

JOB = TrainJob(batch_size=2, num_repeat=2)
NUM_STEPS = 3


class Dying(ThreadingHTTPServer):
    """A swarm server that dies when it is first asked for its engine; in its next life the engine
    comes up, with all steps made."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.asked: list[str] = []

    def reply(self, path: str) -> Any:
        """None where it dies with the question in hand."""
        self.asked.append(path)
        num_starts = self.asked.count("/start_engine")
        match path:
            case "/start_engine" if num_starts == 1:
                return None
            case "/get_engine_status":
                status = "ENGINE.ROLLING" if num_starts == 2 else "ENGINE.OFFLINE"
                return {"engine_status": status, "global_step": NUM_STEPS + 1, "backlog": 0.0}
            case "/get_train_config":
                return JOB.model_dump(mode="json")
            case _:
                return {"success": True}


class Answering(BaseHTTPRequestHandler):
    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        reply = cast(Dying, self.server).reply(self.path)
        if reply is None:
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Generator[Dying]:
    with Dying() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def won(task: Task, access: object) -> float:
    return 1.0


def play(server: Dying, folder: Path | None = None) -> Play:
    material = Material(JOB, won, "agent.py:run", [Task()], (), NUM_STEPS, 1)
    screen = Screen(Console(quiet=True), NUM_STEPS)
    return Play(server.url, material, screen, folder)


def test_a_server_of_its_own_that_dies_while_its_engine_is_started_is_asked_again(
    server: Dying, tmp_path: Path
) -> None:
    assert play(server, tmp_path).run().steps_before == NUM_STEPS
    assert server.asked.count("/sync_train_config") == 2


def test_somebody_elses_server_that_does_not_answer_is_told(server: Dying) -> None:
    with pytest.raises(ServerUnreachable):
        play(server).run()
