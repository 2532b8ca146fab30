"""A headless `opencode serve` and its HTTP API.

opencode is started only once, which saves time. A turn then takes less than a second plus the
model's time.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx

from examples.opencode.opencode_command import environment

Json = dict[str, Any]

START_TIMEOUT_S = 60.0
TURN_TIMEOUT_S = 120.0
STOP_GRACE_S = 5.0
MODEL = {"providerID": "fakevllm", "modelID": "app-model"}


class OpencodeServer:
    """The HTTP API of a running `opencode serve`."""

    def __init__(self, http: httpx.AsyncClient, agent: str) -> None:
        self._http = http
        self._agent = agent

    async def new_session(self, workspace: Path) -> str:
        """Create a session and return its id.

        The session gets a title, so that opencode does not request one from the model.
        """
        return (await self._post("/session", workspace, {"title": "T"}))["id"]

    async def close_workspace(self, workspace: Path) -> None:
        """Tell opencode to free the memory of a workspace. This frees about 20 of 50 MB."""
        await self._post("/instance/dispose", workspace, {})

    async def ask(self, workspace: Path, session: str, text: str) -> Json:
        """Play one turn, including its tool calls. Raises httpx.HTTPError."""
        part = {"type": "text", "text": text}
        body = {"model": MODEL, "agent": self._agent, "parts": [part]}
        return await self._post(f"/session/{session}/message", workspace, body)

    async def _post(self, path: str, workspace: Path, body: Json) -> Any:
        query = {"directory": str(workspace)}
        reply = await self._http.post(path, params=query, json=body)
        return reply.raise_for_status().json()


@contextlib.asynccontextmanager
async def running_opencode(
    command: str, folder: Path, url: str, key: str, agent: str = "small"
) -> AsyncGenerator[OpencodeServer]:
    """Run `opencode serve` in `folder` until the block ends.

    `url` (with `/v1`) and `key` are those of the model's server. Raises TimeoutError if opencode
    does not become ready.
    """
    arguments = ["serve", "--hostname", "127.0.0.1", "--port", "0"]
    log_file = folder / "opencode.log"
    with log_file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            command,
            *arguments,
            cwd=folder,
            env=environment(folder, url, key),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        base_url = await _wait_for_address(log_file)
        async with httpx.AsyncClient(base_url=base_url, timeout=TURN_TIMEOUT_S) as http:
            await _wait_until_ready(http)
            yield OpencodeServer(http, agent)
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_GRACE_S)
    except TimeoutError:  # closing a hundred workspaces may take minutes
        process.kill()
        await process.wait()


async def _wait_for_address(log_file: Path) -> str:
    """Wait until opencode's log has its address, and return it. opencode chooses the port."""
    pattern = r"listening on (http://\S+)\n"
    async with asyncio.timeout(START_TIMEOUT_S):
        while (match := re.search(pattern, log_file.read_text())) is None:
            await asyncio.sleep(0.1)
        return match[1]


async def _wait_until_ready(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            # opencode may never answer a request that it gets during its start. Send another one.
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/global/health", timeout=2)).is_success:
                    return
            await asyncio.sleep(0.1)
