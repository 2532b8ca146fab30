"""Our own routes: tasks for replay, and what the run looks like so far."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from fakevllm.web.components import ProxyComponents
from fakevllm.web.routes.passthrough import error_response
from fakevllm_adapters.http.asgi import ClientDisconnected, read_body
from fakevllm_adapters.http.json_body import parse_json
from fakevllm_adapters.protocol.errors import WireError, error_body, schema_error
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task


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
    returned_random: float | None = None


class NextGroup(BaseModel):
    group_id: str
    kind: str
    is_new_turn: bool


class GroupFeedback(BaseModel):
    kind: str
    state: str
    reason: str | None
    value: float | None


class GroupReply(BaseModel):
    """No texts: any key may ask."""

    group_id: str
    session_id: str | None
    parent_session_id: str | None
    parent_id: str | None
    turn: int | None
    kind: str | None
    evidence: str | None
    state: str
    reason: str | None
    rewards: list[float | None]
    """By sibling."""
    served_index: int | None
    followed: list[NextGroup]
    """What went on from its answer, or asked for another one."""
    feedback: list[GroupFeedback] = []


class PauseReply(BaseModel):
    paused: bool
    trouble: str | None = None
    """Why a restart of the proxy will not know."""


class Stats(BaseModel):
    engine: EngineStatusReply | None
    paused: bool = False
    """Requests are served once until `fakevllm resume`."""
    has_hooks: bool = True
    """Else each is served once for good."""
    counts: dict[str, int]
    """Groups by state."""
    untrained: dict[str, int] = {}
    """Groups that were not trained, by the reason's first word."""
    failures: dict[str, int] = {}
    """Siblings whose answers were none, by why."""
    feedback: dict[str, int] = {}
    """What was said of answers, by what became of it."""
    run_id: str = ""
    """Whose curve it is: the newest run's in this ledger, or the one that was asked for."""
    other_runs: list[str] = []
    """The newest first."""
    curve: list[StepStats]
    sampled_tokens: int
    lookups: dict[str, int]
    """Requests matched to a dataset row by text: hit, miss, tie."""
    ledger_dropped: int = 0
    """Writes the ledger gave up since the proxy's start."""
    ledger_error: str | None = None
    """Why its last write failed; None where it did not."""


ADMIN_PATHS = frozenset({"/fakevllm/pause", "/fakevllm/resume"})
"""They end and begin training for all apps."""


def router(proxy: ProxyComponents) -> APIRouter:
    routes = APIRouter(prefix="/fakevllm")

    @routes.post("/tasks", response_model=TaskKeys)
    async def put_tasks(request: Request) -> TaskKeys | Response:
        try:
            tasks = _parse_tasks(await read_body(request.receive, proxy.config.limits.body_bytes))
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response()  # to nobody
        proxy.tasks.add(tasks)
        proxy.ledger.put_tasks(tasks)
        await proxy.ledger.flush()
        return TaskKeys(keys=[proxy.tasks.key(task.task_id) for task in tasks])

    @routes.post("/pause")
    async def pause() -> PauseReply:
        return PauseReply(trouble=proxy.traffic_gate.pause.set(True), paused=True)

    @routes.post("/resume")
    async def resume() -> PauseReply:
        return PauseReply(trouble=proxy.traffic_gate.pause.set(False), paused=False)

    @routes.get("/groups/{group_id}", response_model=GroupReply)
    async def group(group_id: str) -> GroupReply | Response:
        ledger = proxy.ledger
        found, followed, said = await asyncio.to_thread(
            lambda: (
                ledger.group(group_id),
                ledger.sessions.follow_ups(group_id),
                ledger.feedback.of_group(group_id),
            )
        )
        if found is None:
            message = f"No group {group_id} is in the ledger."
            return error_response(WireError(404, error_body(message, "NotFoundError", 404)))
        shown = {name: getattr(found, name, None) for name in GroupReply.model_fields}
        return GroupReply.model_validate(
            shown
            | {"rewards": [sibling.reward for sibling in found.siblings]}
            | {
                "followed": [
                    NextGroup.model_validate(one, from_attributes=True) for one in followed
                ],
                "feedback": [
                    GroupFeedback.model_validate(one, from_attributes=True) for one in said
                ],
            }
        )

    @routes.get("/engine")
    async def engine() -> EngineStatusReply | None:
        return proxy.link.status

    @routes.get("/stats", response_model=Stats)
    async def stats(run: str = "") -> Stats | Response:
        """`run`: the beginning of a run's id."""
        ledger = proxy.ledger
        runs = await asyncio.to_thread(ledger.runs)
        run_id = next((one for one in runs if one.startswith(run)), "")
        if not run_id.startswith(run):
            message = f"No run that begins with {run!r} is in the ledger: {', '.join(runs)} are."
            return error_response(WireError(404, error_body(message, "NotFoundError", 404, "run")))
        counts, untrained, curve, tokens = await asyncio.to_thread(
            lambda: (
                ledger.counts(),
                ledger.untrained(),
                ledger.curve(run_id),
                ledger.sampled_tokens(),
            )
        )
        feedback = await asyncio.to_thread(ledger.feedback.counts)
        failures = await asyncio.to_thread(ledger.failures)
        return Stats(
            engine=proxy.link.status,
            paused=proxy.traffic_gate.pause.is_on,
            has_hooks=proxy.config.hooks.path is not None,
            counts=counts,
            untrained=untrained,
            failures=failures,
            feedback=feedback,
            run_id=run_id,
            other_runs=[one for one in runs if one != run_id],
            curve=[StepStats.model_validate(row, from_attributes=True) for row in curve],
            sampled_tokens=tokens,
            lookups=dict(proxy.tasks.counts),
            ledger_dropped=ledger.health.dropped,
            ledger_error=ledger.health.error,
        )

    return routes


def _parse_tasks(raw: bytes) -> list[Task]:
    """Raises WireError (400). What cannot be written again (NaN, half a surrogate) is refused: the
    ledger would not take it."""
    try:
        return PutTasks.model_validate(parse_json(raw)).tasks
    except ValidationError as error:
        raise schema_error([dict(problem) for problem in error.errors(include_url=False)]) from None
