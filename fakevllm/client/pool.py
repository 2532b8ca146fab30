"""Talks about the batch that is being collected."""

from __future__ import annotations

from fakevllm.client import control
from fakevllm.client.errors import SwarmError
from fakevllm.client.talk import QUICK_TIMEOUT_S, Ask, Patience, Talk, asked, insisted
from fakevllm_adapters.swarm import EngineStatus, SuccessReply
from fakevllm_adapters.swarm_pool import (
    AgreeRequest,
    EpisodeBuffer,
    EpisodeStatus,
    ExperimentDirReply,
    PoolInformation,
)

POOL_PATH = "/get_current_batch_rollout_pool_information"
STEPPING = (EngineStatus.ROLLING_POST, EngineStatus.WEIGHT_SYNCING)
AGREE_EVERY_S = 2.0


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
    """Asked again until the server takes it: it does once this client has ended an episode since
    the last step."""
    ask = Ask("/agree_sync_weight", AgreeRequest(client_uuid=client_uuid).model_dump())
    patience = Patience(None, AGREE_EVERY_S)
    while True:
        reply = yield from insisted(ask, SuccessReply, Patience(None))
        if reply.success:
            break
        if (yield from control.status()).engine_status is not EngineStatus.ROLLING:
            return False
        yield from patience.pause(reply.failure_reason)
    known = yield from control.status()
    step = known.global_step
    while known.engine_status is EngineStatus.ROLLING and known.global_step == step:
        again = yield from insisted(ask, SuccessReply, Patience(None))
        if not again.success:  # the batch is over, though no step may have come of it
            return True
        yield from patience.pause("the other clients have not agreed yet")
        known = yield from control.status()
    return known.engine_status in STEPPING or (known.global_step or 0) > (step or 0)
