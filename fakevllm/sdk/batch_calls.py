"""Talks about the batch that is being collected."""

from __future__ import annotations

from fakevllm.sdk import engine_calls
from fakevllm.sdk.protocol import QUICK_TIMEOUT_S, Ask, Patience, Talk, asked, insisted
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
AGREE_EVERY_S = 2.0
REFUSED_S = 600.0
"""How long an agreement may be refused: for this client, in another thread, may be in its first
episode since the last step."""


def information() -> Talk[PoolInformation]:
    return (yield from asked(Ask(POOL_PATH, timeout_s=QUICK_TIMEOUT_S), PoolInformation))


def episode_buffer() -> Talk[list[EpisodeStatus]]:
    ask = Ask("/get_episode_buffer", {}, QUICK_TIMEOUT_S)
    return (yield from asked(ask, EpisodeBuffer)).buffer


def experiment_dir() -> Talk[str]:
    ask = Ask("/get_server_experiment_dir", timeout_s=QUICK_TIMEOUT_S)
    reply = yield from asked(ask, ExperimentDirReply)
    if reply.server_experiment_dir is None:
        raise SwarmError("No engine has been started: there is no run yet.")
    return reply.server_experiment_dir


def agree(client_uuid: str) -> Talk[bool]:
    """Asked again until the server takes it, which it does once this client has ended an episode
    since the last step, and then until the step begins: the server may have been started again.
    True where a step has begun, or its batch has come to none, after an agreement was taken. Raises
    SwarmError where it is refused for long."""
    ask = Ask("/agree_sync_weight", AgreeRequest(client_uuid=client_uuid).model_dump())
    patience, refused = Patience(None, AGREE_EVERY_S), Patience(REFUSED_S, AGREE_EVERY_S)
    step = taken_by = None
    while True:
        reply = yield from insisted(ask, SuccessReply, Patience(None))
        known = yield from engine_calls.status_from(Patience(None))
        if reply.success:
            taken_by, refused = known.server_id, Patience(REFUSED_S, AGREE_EVERY_S)
        elif taken_by == known.server_id:  # the batch is over, though no step may have come of it
            return True
        has_agreed = taken_by is not None
        has_grown = step is not None and (known.global_step or 0) > step
        if has_grown or known.engine_status in STEPPING:
            return has_agreed
        if known.engine_status is EngineStatus.OFFLINE:
            return False
        step = known.global_step or 0  # a server that was started again may be at an earlier one
        if known.engine_status is EngineStatus.BOOTING:
            if not has_agreed:
                return False
            yield from patience.pause(f"the engine is in {known.engine_status}")
        elif reply.success:
            yield from patience.pause("the other clients have not agreed yet")
        elif refused.is_over:
            raise SwarmError(reply.failure_reason)
        else:
            yield from refused.pause(reply.failure_reason)
