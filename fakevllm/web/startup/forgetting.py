"""Start the parts that delete texts and token ids, on request and after the time that the
configuration allows."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

import aiohttp

from fakevllm.forgetting.forgetter import Forgetter
from fakevllm.forgetting.retention import Retention
from fakevllm.forgetting.retention_rules import RetentionRules
from fakevllm.forgetting.server_requests import REMEDIES, ServerProblem, ServerRequests
from fakevllm.gate.release_gate import ReleaseGate
from fakevllm.groups.request_pipeline import Pipeline
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.task_set import cancel_task
from fakevllm.swarm.errors import NETWORK_ERRORS, describe_error
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.web.startup.shared_parts import SharedParts
from fakevllm_adapters.protocol.forgetting import ForgetGroupsReply, ForgetGroupsRequest


@dataclass(frozen=True, slots=True)
class Forgetting:
    """The parts that delete texts and token ids."""

    forgetter: Forgetter
    server_requests: ServerRequests
    retention: Retention


def open_forgetting(
    parts: SharedParts,
    pipeline: Pipeline,
    gate: ReleaseGate | None,
    stack: contextlib.AsyncExitStack,
) -> Forgetting:
    """Start the parts. The gate knows the evaluations that go on, whose groups are not pruned."""
    ledger = parts.ledger
    forgetter = Forgetter(ledger, wait_answered=pipeline.wait_answered)
    server_requests = _server_requests(ledger, parts.link)
    rules = RetentionRules(parts.config.job.privacy_or_default)
    open_evaluations = tuple if gate is None else lambda: gate.open_evaluations
    retention = Retention(rules, ledger, forgetter, open_evaluations)
    for work in (server_requests.run(), retention.run()):
        stack.push_async_callback(cancel_task, asyncio.create_task(work))
    return Forgetting(forgetter, server_requests, retention)


def _server_requests(ledger: Ledger, link: SwarmLink) -> ServerRequests:
    async def send(request: ForgetGroupsRequest) -> ForgetGroupsReply:
        try:
            return await link.forget_groups(request)
        except (*NETWORK_ERRORS, ValueError) as error:  # translated
            if isinstance(error, aiohttp.ClientResponseError) and error.status in REMEDIES:
                raise ServerProblem(REMEDIES[error.status]) from None
            raise ServerProblem(describe_error(error)) from None

    async def find_run() -> str:
        if link.status is None:
            raise ServerProblem("is out of reach")
        return link.status.run_id

    return ServerRequests(ledger, send, find_run)
