"""What a swarm server has trained, step by step, as its run log tells it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import httpx

from fakevllm import ServerUnreachable, SwarmClient
from fakevllm_adapters.protocol.swarm import EngineStatus, LogEntry, LogReply

LOOK_EVERY_S = 0.2
SETTLE_LIMIT_S = 60.0
"""A step that takes longer than this is left out of a report."""


def steps_of(server_url: str) -> list[LogEntry]:
    """In order. One that was trained once more after a crash counts as it was the last time."""
    steps = {step.step: step for step in RunLog(server_url).new_steps()}
    return [steps[number] for number in sorted(steps)]


class RunLog:
    """Follows a server: what it has trained since the last look."""

    def __init__(self, server_url: str) -> None:
        self._url = server_url
        self._after = 0

    def new_steps(self) -> Iterator[LogEntry]:
        """Raises httpx.HTTPError; the next look goes on from there."""
        while entries := self._entries():
            self._after = entries[-1].seq
            yield from (entry for entry in entries if entry.kind == "step")

    def _entries(self) -> list[LogEntry]:
        """The next thousand or fewer."""
        answer = httpx.get(f"{self._url}/get_run_log", params={"after": self._after}, timeout=30)
        return LogReply.model_validate(answer.raise_for_status().json()).entries


def settle(client: SwarmClient) -> None:
    """Returns once no step is due or made."""
    limit = time.monotonic() + SETTLE_LIMIT_S
    while time.monotonic() < limit:
        with contextlib.suppress(ServerUnreachable):
            known = client.status()
            if known.engine_status is EngineStatus.ROLLING and known.backlog < 1:
                return
        time.sleep(LOOK_EVERY_S)
