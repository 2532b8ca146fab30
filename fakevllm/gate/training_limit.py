"""Remove the training limit that an earlier proxy process has left at the server. The limit is the
newest version that training may make. The release gate of the earlier process has set the limit."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from fakevllm.swarm.errors import NETWORK_ERRORS, describe_error
from fakevllm_adapters.protocol.swarm import EngineStatusReply, SuccessReply

log = logging.getLogger("fakevllm.gate.training_limit")

CHECK_EVERY_S = 1.0
"""Seconds between two checks of the server's status."""


class LimitedServer(Protocol):
    """Interface of the connection to the server. It has only what this module uses."""

    @property
    def status(self) -> EngineStatusReply | None: ...

    async def limit_training(self, version: int | None) -> SuccessReply: ...


async def remove_training_limit(
    server: LimitedServer, check_every_s: float = CHECK_EVERY_S
) -> None:
    """Remove the training limit that an earlier proxy process has left at the server. The limit is
    the newest version that training may make. Run until this task is cancelled.

    If a run of the server has a limit when this function first sees the run, the function removes
    the limit. A limit that is set later belongs to the release gate of another proxy, and is not
    removed.
    """
    seen, reported = "", ""
    while True:
        await asyncio.sleep(check_every_s)
        status = server.status
        if status is None or status.run_id in ("", seen):
            continue
        trouble = await _remove(server, status)
        if trouble is None:
            seen = status.run_id
        elif trouble != reported:
            reported = trouble
            log.warning("%s; retrying", trouble)


async def _remove(server: LimitedServer, status: EngineStatusReply) -> str | None:
    """Remove the server's training limit (the newest version that training may make), if `status`
    contains a limit. If the removal fails, return the reason. Otherwise return None."""
    if status.training_limit is None:
        return None
    waits = f"training waits at version {status.training_limit}"
    try:
        reply = await server.limit_training(None)
    except (*NETWORK_ERRORS, ValueError) as error:
        return f"{waits}: the server {describe_error(error)}"
    if not reply.success:
        return f"{waits}: {reply.failure_reason}"
    log.info("training goes on: it could wait at version %d for a gate", status.training_limit)
    return None
