"""The training steps of a swarm server, read from its run log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import httpx

from fakevllm import ServerUnreachable, SwarmClient
from fakevllm_adapters.protocol.swarm import EngineStatus, LogEntry, LogReply

POLL_INTERVAL_S = 0.2
IDLE_TIMEOUT_S = 60.0
"""Maximum number of seconds to wait for the last step. If the last step takes longer, the report
leaves it out."""


def trained_steps(server_url: str) -> list[LogEntry]:
    """Return the server's training steps in order.

    If a step was trained again after a crash, only the last entry counts. Raises httpx.HTTPError.
    """
    steps = {step.step: step for step in RunLog(server_url).new_steps()}
    return [steps[number] for number in sorted(steps)]


class RunLog:
    """A reader of a server's run log that remembers its position."""

    def __init__(self, server_url: str) -> None:
        self._url = server_url
        self._after = 0

    def new_steps(self) -> Iterator[LogEntry]:
        """Yield the training steps since the last call.

        If an HTTP request fails, httpx.HTTPError is raised, and the next call continues at the same
        position.
        """
        while entries := self._next_entries():
            self._after = entries[-1].seq
            yield from (entry for entry in entries if entry.kind == "step")

    def _next_entries(self) -> list[LogEntry]:
        """Return up to a thousand entries after the current position."""
        reply = httpx.get(f"{self._url}/get_run_log", params={"after": self._after}, timeout=30)
        return LogReply.model_validate(reply.raise_for_status().json()).entries


def wait_until_idle(client: SwarmClient) -> None:
    """Wait until the server trains no step and has no batch for the next step."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ServerUnreachable):
            status = client.status()
            if status.engine_status is EngineStatus.ROLLING and status.backlog < 1:
                return
        time.sleep(POLL_INTERVAL_S)
