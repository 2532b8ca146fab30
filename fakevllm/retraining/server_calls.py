"""Requests to the server for training on groups from a ledger. Each function is a generator that
yields requests, and the SDK's HTTP driver sends these requests. A request is repeated while the
server restarts."""

from __future__ import annotations

import time

from pydantic import BaseModel

from fakevllm.errors import FakevllmError
from fakevllm.sdk.protocol import (
    QUICK_TIMEOUT_S,
    Backoff,
    Pause,
    ServerCall,
    ServerRequest,
    fetch_with_retries,
)
from fakevllm.sdk.types import SwarmError
from fakevllm_adapters.protocol.swarm import (
    AddLoggedGroupReply,
    AddLoggedGroupRequest,
    EngineStatus,
    EngineStatusReply,
    LogEntry,
    LogReply,
)

RETRY_FOR_S = 120.0
"""Seconds of pauses for which a request is repeated while the server does not answer."""
POLL_EVERY_S = 0.05
MAX_IDLE_S = 5.0
"""Seconds after which a step that was due, and that the server has not begun, will not be made. The
server waits for a shorter time between two attempts at a step."""


class _Text(BaseModel):
    prompt: str


def add_group(request: AddLoggedGroupRequest) -> ServerCall[AddLoggedGroupReply]:
    """Send a group from a ledger (a request with its sampled answers) to the server, to be trained.
    Raises SwarmError if the server refuses the group."""
    sent = ServerRequest("/add_logged_group", request.model_dump(mode="json"))
    return (yield from fetch_with_retries(sent, AddLoggedGroupReply, Backoff(RETRY_FOR_S)))


def text_of(token_ids: list[int]) -> ServerCall[str | None]:
    """Return the text of token ids under the server's model. Return None if the engine refuses the
    ids, because the model does not have one of them."""
    request = ServerRequest("/detokenize", {"tokens": token_ids}, QUICK_TIMEOUT_S)
    try:
        return (yield from fetch_with_retries(request, _Text, Backoff(RETRY_FOR_S))).prompt
    except SwarmError as error:
        if error.status != 400:
            raise
        return None


def log_after(seq: int) -> ServerCall[list[LogEntry]]:
    """Return the entries of the server's run log after the entry with the number `seq`."""
    request = ServerRequest(f"/get_run_log?after={seq}", timeout_s=QUICK_TIMEOUT_S)
    return (yield from fetch_with_retries(request, LogReply, Backoff(RETRY_FOR_S))).entries


def end_of_step(step: int) -> ServerCall[int]:
    """Wait until the server has finished the training step `step`, or has given it up. The server
    gives up a step that failed several times, and a step without trainable groups. Return the
    number of groups that still wait for a step.

    Raises FakevllmError if the engine is off, if training has stopped, or if the server reports a
    problem for too long, such as a full disk.
    """
    request = ServerRequest("/get_engine_status", timeout_s=QUICK_TIMEOUT_S)
    idle_since: float | None = None
    failing_since: float | None = None
    while True:
        status = yield from fetch_with_retries(request, EngineStatusReply, Backoff(RETRY_FOR_S))
        detail = status.engine_status_detail
        if status.engine_status is EngineStatus.OFFLINE:
            raise FakevllmError(f"The engine is off: {detail or 'somebody stopped it'}.")
        is_rolling = status.engine_status is EngineStatus.ROLLING
        now = time.monotonic()
        failing_since = (failing_since or now) if is_rolling and detail else None
        has_failed = failing_since is not None and now - failing_since > RETRY_FOR_S
        if is_rolling and (status.closed is not None or has_failed):
            raise FakevllmError(f"Training has stopped: {detail or status.closed}.")
        if is_rolling and (status.global_step or 0) > step:
            return status.waiting.get("finished_groups", 0)
        idle_since = (idle_since or now) if status.is_between_steps else None
        if idle_since is not None and now - idle_since > MAX_IDLE_S:
            return status.waiting.get("finished_groups", 0)
        yield Pause(POLL_EVERY_S, f"training step {step}")
