"""The batch that is being collected: what is in it, and who agrees that it is enough."""

from __future__ import annotations

import time

from fastapi import APIRouter, HTTPException

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.pool import AgreeRequest, PoolInformation
from fakevllm_adapters.protocol.swarm import SuccessReply
from fakevllm_server.api.refusals import ClearRoute
from fakevllm_server.batch_told import pool_information
from fakevllm_server.collecting import method_of
from fakevllm_server.swarm import Swarm


def router(swarm: Swarm) -> APIRouter:
    routes = APIRouter(route_class=ClearRoute)

    @routes.get("/get_current_batch_rollout_pool_information")
    async def get_current_batch_rollout_pool_information() -> PoolInformation:
        return pool_information(swarm)

    @routes.post("/agree_sync_weight")
    async def agree_sync_weight(request: AgreeRequest) -> SuccessReply:
        job = swarm.job or TrainJob()
        if not method_of(job).is_agreed_on:
            raise HTTPException(
                400,
                "This job's steps need no agreement: swarm_mode_sample_collection_method is "
                f"{job.swarm_mode_sample_collection_method}. Name one that ends in "
                "agree_sync_weight.",
            )
        refusal = swarm.pool.clients.agree(request.client_uuid, time.monotonic())
        swarm.changed()
        return SuccessReply(success=refusal is None, failure_reason=refusal or "")

    return routes
