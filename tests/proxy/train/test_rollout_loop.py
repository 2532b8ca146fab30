"""Starting the engine when the server dies meanwhile."""

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
from fakevllm.train.progress_display import ProgressDisplay
from fakevllm.train.rollout_loop import RolloutLoop
from fakevllm.train.training_inputs import TrainingInputs

JOB = TrainJob(batch_size=2, num_repeat=2)
NUM_STEPS = 3


class DyingServer(ThreadingHTTPServer):
    """A swarm server that dies at the first request to start its engine. After that, it starts the
    engine, and all steps are trained."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), RequestHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.paths: list[str] = []

    def reply(self, path: str) -> Any:
        """Return the reply; None if the server dies before it replies."""
        self.paths.append(path)
        num_starts = self.paths.count("/start_engine")
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


class RequestHandler(BaseHTTPRequestHandler):
    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        reply = cast(DyingServer, self.server).reply(self.path)
        if reply is None:
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Generator[DyingServer]:
    with DyingServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def constant_workflow(task: Task, access: object) -> float:
    return 1.0


def rollout_loop(server: DyingServer, run_dir: Path | None = None) -> RolloutLoop:
    inputs = TrainingInputs(
        JOB, constant_workflow, "agent.py:run", [Task()], (), NUM_STEPS, max_parallel=1
    )
    display = ProgressDisplay(Console(quiet=True), NUM_STEPS)
    return RolloutLoop(server.url, inputs, display, run_dir)


def test_an_own_server_that_dies_while_it_starts_its_engine_gets_the_request_again(
    server: DyingServer, tmp_path: Path
) -> None:
    assert rollout_loop(server, tmp_path).run().steps_before == NUM_STEPS
    assert server.paths.count("/sync_train_config") == 2


def test_a_foreign_server_that_does_not_answer_is_an_error(server: DyingServer) -> None:
    with pytest.raises(ServerUnreachable):
        rollout_loop(server).run()
