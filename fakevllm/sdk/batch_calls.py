"""Server calls about the batch that is being collected."""

from __future__ import annotations

from fakevllm.sdk import engine_calls
from fakevllm.sdk.protocol import (
    QUICK_TIMEOUT_S,
    Backoff,
    ServerCall,
    ServerRequest,
    fetch,
    fetch_with_retries,
)
from fakevllm.sdk.types import SwarmError
from fakevllm_adapters.protocol.pool import (
    AgreeRequest,
    EpisodeBuffer,
    EpisodeStatus,
    ExperimentDirReply,
    PoolInformation,
)
from fakevllm_adapters.protocol.swarm import EngineStatus, SuccessReply

POOL_PATH = "/get_current_batch_rollout_pool_information"
STEPPING = (EngineStatus.ROLLING_POST, EngineStatus.WEIGHT_SYNCING)
AGREE_INTERVAL_S = 2.0
MAX_REFUSED_S = 600.0
"""Seconds an agreement may be refused. The client's first episode since the last step may still run
in another thread."""


def pool_information() -> ServerCall[PoolInformation]:
    return (yield from fetch(ServerRequest(POOL_PATH, timeout_s=QUICK_TIMEOUT_S), PoolInformation))


def episode_buffer() -> ServerCall[list[EpisodeStatus]]:
    request = ServerRequest("/get_episode_buffer", {}, QUICK_TIMEOUT_S)
    return (yield from fetch(request, EpisodeBuffer)).buffer


def experiment_dir() -> ServerCall[str]:
    """Return the folder of the server's run. Raises SwarmError before the engine's first start."""
    request = ServerRequest("/get_server_experiment_dir", timeout_s=QUICK_TIMEOUT_S)
    reply = yield from fetch(request, ExperimentDirReply)
    if reply.server_experiment_dir is None:
        raise SwarmError("No engine has been started: there is no run yet.")
    return reply.server_experiment_dir


def agree(client_uuid: str) -> ServerCall[bool]:
    """Agree to the training step, and wait until it begins.

    The server accepts an agreement once the client has ended an episode since the last step. The
    agreement is sent repeatedly until the step begins, because a restarted server forgets it.

    Returns True if the agreement was accepted, and then a step began or the batch was dropped
    without a step. Returns False if a step began without this client's agreement, or if the engine
    does not collect a batch. Raises SwarmError if the agreement is refused for MAX_REFUSED_S
    seconds.
    """
    body = AgreeRequest(client_uuid=client_uuid).model_dump()
    request = ServerRequest("/agree_sync_weight", body)
    backoff = Backoff(None, AGREE_INTERVAL_S)
    refused_backoff = Backoff(MAX_REFUSED_S, AGREE_INTERVAL_S)
    step = accepted_by = None
    while True:
        reply = yield from fetch_with_retries(request, SuccessReply, Backoff(None))
        status = yield from engine_calls.status_with_retries(Backoff(None))
        if reply.success:
            accepted_by = status.server_id
            refused_backoff = Backoff(MAX_REFUSED_S, AGREE_INTERVAL_S)
        elif accepted_by == status.server_id:  # the batch is over, perhaps without a step
            return True
        has_agreed = accepted_by is not None
        has_stepped = step is not None and (status.global_step or 0) > step
        if has_stepped or status.engine_status in STEPPING:
            return has_agreed
        if status.engine_status is EngineStatus.OFFLINE:
            return False
        step = status.global_step or 0  # a restarted server may be at an earlier step
        if status.engine_status is EngineStatus.BOOTING:
            if not has_agreed:
                return False
            yield from backoff.pause(f"the engine is in {status.engine_status}")
        elif reply.success:
            yield from backoff.pause("the other clients have not agreed yet")
        elif refused_backoff.is_exhausted:
            raise SwarmError(reply.failure_reason)
        else:
            yield from refused_backoff.pause(reply.failure_reason)
