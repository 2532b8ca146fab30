"""The demo's requests while its server or proxy is restarted."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fakevllm.demo.accuracy_probe import CONCURRENCY, NUM_SAMPLES
from fakevllm.demo.command import ANY_PORT, probe_once, register_until_reachable
from fakevllm.demo.run_state import wait_for_final_status
from fakevllm.demo.tasks import all_tasks
from fakevllm.errors import FakevllmError
from fakevllm.processes.output import LogFile
from fakevllm.processes.supervisor import SupervisedProcess
from fakevllm.web.routes.admin import Stats
from tests.proxy.demo.test_demo import run_at
from tests.proxy.scripted_swarm import ROLLING, until

NUM_REFUSED = 12
"""Number of refused requests, more than the openai client retries by default."""
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "8."}}],
}
STATS = Stats(engine=None, counts={}, curve=[], sampled_tokens=0, lookups={})


class RestartingServer:
    """A server that refuses requests at first, as during a restart, and then answers."""

    def __init__(self, *answers: object, num_refused: int = NUM_REFUSED) -> None:
        self.num_left = num_refused
        self.answers = list(answers)

    async def answer(self, _: web.Request) -> web.Response:
        self.num_left -= 1
        if self.num_left >= 0:
            return web.Response(status=503, headers={"Retry-After-Ms": "1"})
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.json_response(answer)


@asynccontextmanager
async def serving(server: RestartingServer) -> AsyncGenerator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with TestServer(app) as test_server:
        yield str(test_server.make_url("")).rstrip("/")


async def test_a_probe_survives_a_restart_of_the_server(tmp_path: Path) -> None:
    num_refused = NUM_REFUSED * CONCURRENCY
    async with serving(RestartingServer(ANSWER, num_refused=num_refused)) as url:
        probe = await probe_once(run_at(url, tmp_path), "m", "after")
    assert len(probe.samples) == NUM_SAMPLES


async def test_tasks_are_registered_at_a_proxy_that_restarts() -> None:
    tasks = all_tasks()
    async with serving(RestartingServer({"keys": ["k"] * len(tasks)}, num_refused=1)) as url:
        assert len(await register_until_reachable(url, tasks)) == len(tasks)


async def test_the_final_status_is_fetched_after_the_end(tmp_path: Path) -> None:
    final = STATS.model_copy(update={"engine": ROLLING, "counts": {"trained": 8}})
    answers = [stats.model_dump(mode="json") for stats in (STATS, final)]
    async with serving(RestartingServer(*answers, num_refused=1)) as url:
        run = run_at(url, tmp_path)
        run.stats = STATS.model_copy(update={"engine": ROLLING, "counts": {"pooled": 8}})
        await wait_for_final_status(run)
    assert run.stats is not None and run.stats.counts == {"trained": 8}


async def test_a_proxy_without_a_final_status_ends_the_demo_with_a_line(tmp_path: Path) -> None:
    with pytest.raises(
        FakevllmError, match=r"did not report the final status .* 0 s: .*proxy\.log"
    ):
        await wait_for_final_status(run_at("http://127.0.0.1:9", tmp_path), timeout_s=0.1)


async def test_a_connection_to_a_dead_process_is_answered_after_its_restart(
    tmp_path: Path,
) -> None:
    with socket.create_server(ANY_PORT) as listener:
        port = listener.getsockname()[1]
        arguments = ["start", "--backend", "fake", "--run-dir", str(tmp_path / "run")]
        log = LogFile(tmp_path / "log")
        server = SupervisedProcess("the server", "fakevllm_server", arguments, log, listener)
        supervision = asyncio.create_task(server.run(lambda note: None))
        url = f"http://127.0.0.1:{port}/get_engine_status"
        try:
            async with aiohttp.ClientSession(raise_for_status=True) as http:
                first = await (await http.get(url)).json()
                assert server.pid is not None
                os.kill(server.pid, signal.SIGKILL)
                await until(lambda: server.num_restarts == 1)
                second = await (await http.get(url)).json()
        finally:
            supervision.cancel()
            await asyncio.gather(supervision, return_exceptions=True)
    assert first["server_id"] != second["server_id"]
