"""The command `fakevllm eval` in front of a scripted proxy."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from aiohttp import web

from fakevllm.evaluation.messages import CHECK_PATH, END_PATH
from tests.proxy.scripted_swarm import TIMEOUT_S, ScriptedSwarm, until


def write_rows(folder: Path, num: int) -> Path:
    file = folder / "held_out.jsonl"
    file.write_text("".join(f'{{"question": "Row {n}?"}}\n' for n in range(num)))
    return file


class LoadingProxy(ScriptedSwarm):
    """A proxy that does not answer the check until the evaluation has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.answers[END_PATH] = {}
        self.has_ended = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.Response:
        response = await super()._answer(request)
        if request.path == CHECK_PATH:
            await self.has_ended.wait()
        if request.path == END_PATH:
            self.has_ended.set()
        return response


async def test_ctrl_c_while_versions_are_loaded_lets_the_proxy_unload_them(tmp_path: Path) -> None:
    file = write_rows(tmp_path, 1)
    async with LoadingProxy() as proxy:
        flags = ["--dataset", str(file), "--url", proxy.url, "--version", "0", "--version", "3"]
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fakevllm", "eval", *flags, cwd=tmp_path
        )
        try:
            await until(lambda: proxy.calls[CHECK_PATH] > 0)
            command.send_signal(signal.SIGINT)
            async with asyncio.timeout(TIMEOUT_S):
                assert await command.wait() == 130
            assert proxy.bodies[END_PATH] == {"versions": [0, 3]}
        finally:
            proxy.has_ended.set()
            if command.returncode is None:
                command.kill()
                await command.wait()
