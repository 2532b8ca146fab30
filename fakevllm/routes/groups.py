"""Our own routes: tasks for replay, and what the run looks like so far."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from fakevllm.proxy import Proxy
from fakevllm.routes.passthrough import worded
from fakevllm_adapters.asgi import ClientLeft, read_body
from fakevllm_adapters.body import loads
from fakevllm_adapters.errors import WireError, schema_error
from fakevllm_adapters.swarm import EngineStatusReply, Task


class PutTasks(BaseModel):
    tasks: list[Task]


class TaskKeys(BaseModel):
    keys: list[str]
    """API keys, one a task, in order."""


class StepStats(BaseModel):
    step: int
    groups: int
    policy_mean: float
    returned_best: float | None
    without_signal: int


class Stats(BaseModel):
    engine: EngineStatusReply | None
    counts: dict[str, int]
    """Groups by state."""
    curve: list[StepStats]
    sampled_tokens: int
    lookups: dict[str, int]
    """Requests matched to a dataset row by text: hit, miss, tie."""
    ledger_dropped: int = 0
    """Writes the ledger gave up since the proxy's start."""
    ledger_error: str | None = None
    """Why its last write failed; None where it did not."""


def router(proxy: Proxy) -> APIRouter:
    routes = APIRouter(prefix="/fakevllm")

    @routes.post("/tasks", response_model=TaskKeys)
    async def put_tasks(request: Request) -> TaskKeys | Response:
        try:
            tasks = _tasks_in(await read_body(request.receive, proxy.config.limits.body_bytes))
        except WireError as error:
            return worded(error)
        except ClientLeft:
            return Response()  # to nobody
        proxy.tasks.add(tasks)
        proxy.ledger.put_tasks(tasks)
        await proxy.ledger.flush()
        return TaskKeys(keys=[proxy.tasks.key(task.task_id) for task in tasks])

    @routes.get("/engine")
    async def engine() -> EngineStatusReply | None:
        return proxy.link.status

    @routes.get("/stats")
    async def stats() -> Stats:
        ledger = proxy.ledger
        counts, curve, tokens = await asyncio.to_thread(
            lambda: (ledger.counts(), ledger.curve(), ledger.sampled_tokens())
        )
        return Stats(
            engine=proxy.link.status,
            counts=counts,
            curve=[StepStats.model_validate(row, from_attributes=True) for row in curve],
            sampled_tokens=tokens,
            lookups=dict(proxy.tasks.counts),
            ledger_dropped=ledger.health.dropped,
            ledger_error=ledger.health.error,
        )

    return routes


def _tasks_in(raw: bytes) -> list[Task]:
    """Raises WireError (400). What cannot be written again (NaN, half a surrogate) is refused: the
    ledger would not take it."""
    try:
        return PutTasks.model_validate(loads(raw)).tasks
    except ValidationError as error:
        raise schema_error([dict(problem) for problem in error.errors(include_url=False)]) from None
