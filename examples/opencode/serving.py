"""`opencode serve`, headless, over its HTTP API: warm, a turn takes less than a second beside the
model's time."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx

from examples.opencode.recorded import environment

Json = dict[str, Any]

START_TIMEOUT_S = 60.0
TURN_TIMEOUT_S = 120.0
STOP_GRACE_S = 5.0
MODEL = {"providerID": "fakevllm", "modelID": "app-model"}


class Opencode:
    def __init__(self, http: httpx.AsyncClient, agent: str) -> None:
        self._http = http
        self._agent = agent

    async def new_session(self, workspace: Path) -> str:
        """With a title of its own, so that it asks the model for none."""
        return (await self._post("/session", workspace, {"title": "T"}))["id"]

    async def leave(self, workspace: Path) -> None:
        """Nothing more is asked there; without, it keeps some 50 MB for each folder."""
        await self._post("/instance/dispose", workspace, {})

    async def ask(self, workspace: Path, session: str, text: str) -> Json:
        """One turn, tools and all. Raises httpx.HTTPError."""
        part = {"type": "text", "text": text}
        body = {"model": MODEL, "agent": self._agent, "parts": [part]}
        return await self._post(f"/session/{session}/message", workspace, body)

    async def _post(self, path: str, workspace: Path, body: Json) -> Any:
        query = {"directory": str(workspace)}
        answer = await self._http.post(path, params=query, json=body)
        return answer.raise_for_status().json()


@contextlib.asynccontextmanager
async def serving(
    command: str, workspaces: Path, url: str, key: str, agent: str = "small"
) -> AsyncGenerator[Opencode]:
    """Until the block ends. `url` is the model's, with `/v1`. Raises TimeoutError."""
    arguments = ["serve", "--hostname", "127.0.0.1", "--port", "0"]
    log_file = workspaces / "opencode.log"
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            command,
            *arguments,
            cwd=workspaces,
            env=environment(workspaces, url, key),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        base = await _address_in(log_file)
        async with httpx.AsyncClient(base_url=base, timeout=TURN_TIMEOUT_S) as http:
            await _until_ready(http)
            yield Opencode(http, agent)
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_GRACE_S)
    except TimeoutError:  # after a hundred folders it may take minutes to leave them
        process.kill()
        await process.wait()


async def _address_in(log_file: Path) -> str:
    """Of a port that it chose: it tells when it listens there."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while (told := re.search(r"listening on (http://\S+)\n", log_file.read_text())) is None:
            await asyncio.sleep(0.1)
        return told[1]


async def _until_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            # A request that comes while it starts may never be answered: ask again.
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/global/health", timeout=2)).is_success:
                    return
            await asyncio.sleep(0.1)
