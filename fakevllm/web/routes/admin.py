"""The proxy's own routes below /fakevllm: registering tasks, pausing training (the kill switch),
groups, engine status and statistics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ValidationError

from fakevllm.ledger.curve_reads import CurveEnds
from fakevllm.ledger.forgotten_groups import Cause
from fakevllm.rescoring.hook_reloader import ReloadsStopped, ReloadState
from fakevllm.web.arm_views import ArmStats, arm_stats
from fakevllm.web.proxy_components import ProxyComponents
from fakevllm.web.routes.group_receipt import GroupReply, group_reply
from fakevllm.web.routes.passthrough import error_response
from fakevllm.web.startup.hook_reloads import RunningHooks
from fakevllm_adapters.http.asgi import ClientDisconnected, header_map, read_body
from fakevllm_adapters.http.json_body import parse_json
from fakevllm_adapters.protocol.credentials import api_key_of
from fakevllm_adapters.protocol.errors import WireError, error_body, schema_error, unavailable
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task


class PutTasks(BaseModel):
    """Body of POST /fakevllm/tasks."""

    tasks: list[Task]


class TaskKeys(BaseModel):
    keys: list[str]
    """One API key per task, in the order of the tasks."""


class StepStats(BaseModel):
    """One training step of the learning curve, read from the proxy's ledger."""

    step: int
    groups: int
    """Number of groups with at least one reward."""
    policy_mean: float | None
    """Mean reward of all scored siblings, except leads (the apps' own requests) that were sampled
    at temperature 0. None if no other sibling was scored."""
    returned_best: float | None
    """Mean reward of the served siblings that were not chosen at random. None if no such sibling
    was scored."""
    without_signal: int
    """Number of groups whose rewards are all equal, so that nothing can be learnt from them."""
    returned_random: float | None = None
    """Mean reward of the served siblings that were chosen at random. None if no such sibling was
    scored."""
    hooks: list[str] = []
    """Digests of the hook files that computed the rewards of this step."""
    jobs: list[str] = []
    """Digests of the training jobs of the server at the time when the groups of this step were
    collected."""
    changed: str = ""
    """What changed between the previous step and this step, such as `the hooks changed`; empty if
    nothing changed. After a change, means cannot be compared with earlier means."""


class PauseReply(BaseModel):
    """State of the kill switch. While the kill switch is on, new requests get no siblings and are
    not trained."""

    paused: bool
    trouble: str | None = None
    """Error that kept the state from being stored, so that the state will be lost when the proxy
    restarts. None if the state is stored."""


class ReleaseStats(BaseModel):
    """State of the release gate."""

    released: int | None
    """The released version, which answers the sessions of the released arm. None while the server
    has not sent the version."""
    candidate: int | None
    """Version that is being evaluated; None if no version is being evaluated."""
    is_held: bool
    """Whether releases are stopped: no version is released before somebody runs `fakevllm release
    resume`."""
    evaluation: dict[str, Any] = {}
    """Figures of the present evaluation: the candidate's mean reward minus the mean reward of the
    released version, with the confidence interval of this difference. If versions are evaluated
    between training steps, each newly released version first answers the held-out rows. During this
    time, the key `reference` has the released version, `reference_size` has the number of rows, and
    `reference_draws` has the number of rows that are answered already. The dict is empty if nothing
    is evaluated."""
    next_candidate: int | None = None
    """Version that will be evaluated next. None while another version is being evaluated, or if no
    evaluation is planned."""
    trouble: str | None = None
    """Reason why the gate can make no decision at present; None if there is no such reason."""
    has_released_arm: bool = True
    """Whether the released version answers some sessions, while the newest version answers others.
    If False, the newest version answers all sessions, and training waits while this version is
    evaluated."""


class GuardAlarm(BaseModel):
    """An alarm of the guard that has not ended."""

    detector: str
    step: int
    """Step after which the alarm was raised."""
    version: int
    message: str
    """What the detector saw, with its threshold."""
    remedy: str
    action: str
    """`warn`, `hold` or `rollback`."""
    is_pending: bool
    """Whether the action is not carried out yet."""


class GuardStats(BaseModel):
    """State of the guard, which notices when training goes wrong."""

    alarms: list[GuardAlarm]
    trouble: str | None = None
    """Reason why the guard cannot read the run log or carry out an action; None if it can."""


class ReloadReply(BaseModel):
    """The outcome of a reload of the hooks."""

    state: ReloadState
    """`taken_over`, `unchanged`, `refused`, or `postponed` (try again later)."""
    message: str
    """One line with the result of the reload and the reason for this result."""
    changes: list[str] = []
    """Lines that compare the new rewards of the latest groups with the old ones."""
    figures: dict[str, Any] | None = None
    """All figures of the comparison of the new rewards with the old ones. None if no group was
    tried."""
    at: float
    """Unix time at which the reload ended."""


class HookStats(BaseModel):
    """The state of the reward hooks of this proxy."""

    digest: str
    """Digest of the hook files whose hooks score new groups."""
    since: float
    """Unix time since which these hooks have scored new groups."""
    num_versions: int
    """Number of versions of the hooks that are running. An older version keeps running until its
    last group is done."""
    last_reload: ReloadReply | None
    """The last reload that found edited hook files; None if no reload has found any."""


class PrivacyStats(BaseModel):
    """Statistics of the groups (requests with their answers) whose contents were deleted from the
    ledger."""

    forgotten: int = 0
    """Number of groups that `fakevllm forget` deleted."""
    pruned: int = 0
    """Number of groups that were pruned, because they were too old or the ledger was too large."""
    pruned_since_start: int = 0
    """Number of groups that were pruned since the proxy started."""
    last_pruned_at: float | None = None
    """Unix time at which groups were last pruned since the proxy started."""
    unsent: int = 0
    """Number of these groups whose calls the server has not deleted yet."""
    server_problem: str = ""
    """Reason why the server did not delete them at the last attempt; empty if there is none."""
    trouble: str | None = None
    """Reason why groups cannot be pruned, or why the ledger stays too large; None if neither."""


class HookFailureStats(BaseModel):
    """How many of the latest groups failed in a hook."""

    num_failed: int
    num_groups: int
    """Number of groups that were counted."""
    reason: str
    """Reason of the latest failure, without the message of an exception."""


class Stats(BaseModel):
    """Statistics of this proxy and its ledger."""

    engine: EngineStatusReply | None
    paused: bool = False
    """Whether the kill switch is on. While it is on, new requests get no siblings and are not
    trained. The command `fakevllm resume` switches it off."""
    has_hooks: bool = True
    """Whether the proxy has hooks. Without hooks, requests get no siblings and are not trained."""
    hooks_changed: str | None = None
    """Warning that the hook files were edited after the hooks had been loaded. None if the files
    were not edited."""
    hooks: HookStats | None = None
    """The hooks that score new groups; None without hooks."""
    hook_failures: HookFailureStats | None = None
    """How many of the latest groups failed in a hook. None if none did."""
    counts: dict[str, int]
    """Number of groups by state."""
    untrained: dict[str, int] = {}
    """Number of groups that were not trained, by reason (the part of the stored reason before its
    colon)."""
    failures: dict[str, int] = {}
    """Number of siblings without a usable answer, by the kind of failure, such as `cut_off`."""
    feedback: dict[str, int] = {}
    """Number of feedback items by state."""
    edits: dict[str, int] = {}
    """Number of users' edits by state. Only edits that the proxy was asked to train are counted."""
    arms: ArmStats | None = None
    """Sessions and gains by arm (which decides the weights that answer a session). None if all
    sessions are in the training arm."""
    release: ReleaseStats | None = None
    """State of the release gate; None unless `release.mode` is `gated`."""
    guard: GuardStats | None = None
    """State of the guard; None without hooks, or if all detectors are off."""
    run_id: str = ""
    """Id of the run whose curve is shown: the requested run, or the newest run in this ledger."""
    other_runs: list[str] = []
    """Ids of the other runs in this ledger, newest first."""
    curve: list[StepStats]
    """The steps of the learning curve, or its two ends if the request has `curve=ends`."""
    curve_before: int = 0
    """With `curve=ends`: number of steps that are left out before the first step of `curve`,
    because the hooks or the job changed after them."""
    curve_between: int = 0
    """With `curve=ends`: number of steps that are left out between the two ends."""
    sampled_tokens: int
    lookups: dict[str, int]
    """Number of searches for a request's text in the dataset, by the result of the search: `hit`,
    `miss`, `tie` (several match)."""
    privacy: PrivacyStats = PrivacyStats()
    """What was forgotten and pruned."""
    ledger_bytes: int = 0
    """Size of the ledger in bytes."""
    ledger_dropped: int = 0
    """Number of writes to the ledger that failed for good since the proxy started."""
    ledger_error: str | None = None
    """Error of the last write to the ledger; None if that write succeeded."""


_MAX_SHOWN_IDS = 3
"""Number of task ids that an error message quotes."""
ADMIN_PATHS = frozenset(
    {
        "/fakevllm/pause",
        "/fakevllm/resume",
        "/fakevllm/hooks/reload",
        "/fakevllm/forget",
        "/fakevllm/configuration",
    }
)
"""Paths that require the key of an admin, because they affect all apps or name files of the
machine."""


def router(proxy: ProxyComponents) -> APIRouter:
    """Return the routes below /fakevllm."""
    routes = APIRouter(prefix="/fakevllm")

    @routes.post("/tasks", response_model=TaskKeys)
    async def put_tasks(request: Request) -> TaskKeys | Response:
        """Register tasks, which are rows of a dataset. The reply has one API key per task."""
        try:
            tasks = _parse_tasks(await read_body(request.receive, proxy.config.limits.body_bytes))
        except WireError as error:
            return error_response(error)
        except ClientDisconnected:
            return Response()  # the client has disconnected
        owner = proxy.tasks.owner_of(api_key_of(header_map(request.scope)))
        if refused := proxy.tasks.ids_of_others(tasks, owner):
            return error_response(_task_conflict(refused))
        proxy.tasks.add(tasks, owner)
        proxy.ledger.put_tasks(tasks, owner)
        await proxy.ledger.flush()
        return TaskKeys(keys=[proxy.tasks.key(task.task_id, owner) for task in tasks])

    @routes.post("/pause")
    async def pause() -> PauseReply:
        """Turn the kill switch on: requests are answered, and none of them is trained."""
        return PauseReply(trouble=proxy.traffic_gate.pause.set(True), paused=True)

    @routes.post("/resume")
    async def resume() -> PauseReply:
        """Turn the kill switch off."""
        return PauseReply(trouble=proxy.traffic_gate.pause.set(False), paused=False)

    @routes.post("/hooks/reload", response_model=ReloadReply)
    async def reload_hooks() -> ReloadReply | Response:
        """Try the edited hook files, and let them take over if they pass. The reply has the
        result."""
        if proxy.hooks is None:
            message = "The proxy has no hooks: start it with `fakevllm serve --hooks FOLDER`."
            return error_response(WireError(409, error_body(message, "ConflictError", 409)))
        try:
            outcome = await proxy.hooks.reloader.reload()
            return ReloadReply.model_validate(outcome, from_attributes=True)
        except ReloadsStopped:
            return error_response(unavailable("The proxy is stopping."))

    @routes.get("/groups/{group_id}", response_model=GroupReply)
    async def group(group_id: str) -> GroupReply | Response:
        """Return the receipt of one group, without texts."""
        return await group_reply(proxy, group_id)

    @routes.get("/engine")
    async def engine() -> EngineStatusReply | None:
        """Return the latest status of the server's engine; null if it is unknown."""
        return proxy.link.status

    @routes.get("/stats", response_model=Stats)
    async def stats(run: str = "", curve: str = "") -> Stats | Response:
        """Return the state of the engine, counts of groups, and the learning curve of a run. The
        query `run` chooses another run than the newest, and `curve=ends` shortens the curve."""
        return await _stats_reply(proxy, run, ends_only=curve == "ends")

    return routes


def _hook_stats(hooks: RunningHooks) -> HookStats:
    last, versions = hooks.reloader.last, hooks.versions
    return HookStats(
        digest=versions.info.content_hash,
        since=versions.since,
        num_versions=versions.num_open,
        last_reload=last and ReloadReply.model_validate(last, from_attributes=True),
    )


async def _stats_reply(proxy: ProxyComponents, run: str, *, ends_only: bool) -> Stats | Response:
    """Return the statistics of the proxy. The learning curve is that of the newest run whose id
    begins with `run`. If there is no such run, return a response with status 404. If `ends_only` is
    True, read only the first and the last steps of the curve."""
    # Read before the ledger, which then usually has all groups of the steps that the status calls
    # finished. Only groups that the ledger's writer thread has not written yet are missing.
    engine = proxy.link.status
    ledger = proxy.ledger
    runs = await asyncio.to_thread(ledger.runs)
    run_id = next((name for name in runs if name.startswith(run)), "")
    if not run_id.startswith(run):
        message = (
            f"No run whose id begins with {run!r} is in the ledger. Its runs: {', '.join(runs)}."
        )
        return error_response(WireError(404, error_body(message, "NotFoundError", 404, "run")))
    counts, untrained, curve, tokens = await asyncio.to_thread(
        lambda: (
            ledger.counts(),
            ledger.untrained(),
            ledger.curve_ends(run_id) if ends_only else CurveEnds(ledger.curve(run_id)),
            ledger.sampled_tokens(),
        )
    )
    feedback = await asyncio.to_thread(ledger.feedback.counts)
    edits = await asyncio.to_thread(ledger.edits.counts)
    failures = await asyncio.to_thread(ledger.failures)
    return Stats(
        engine=engine,
        paused=proxy.traffic_gate.pause.is_on,
        has_hooks=proxy.config.hooks.path is not None,
        hooks_changed=None if proxy.hooks is None else await proxy.hooks.files.check(),
        hooks=None if proxy.hooks is None else _hook_stats(proxy.hooks),
        hook_failures=None
        if (count := proxy.pipeline.hook_failures.count()) is None
        else HookFailureStats.model_validate(count, from_attributes=True),
        counts=counts,
        untrained=untrained,
        failures=failures,
        feedback=feedback,
        edits=edits,
        arms=None if proxy.arms is None else arm_stats(proxy.arms),
        release=None
        if proxy.gate is None
        else ReleaseStats.model_validate(proxy.gate.view(), from_attributes=True),
        guard=None
        if proxy.guard is None
        else GuardStats.model_validate(proxy.guard.view(), from_attributes=True),
        run_id=run_id,
        other_runs=[name for name in runs if name != run_id],
        curve=[StepStats.model_validate(row, from_attributes=True) for row in curve.steps],
        curve_before=curve.num_before,
        curve_between=curve.num_between,
        sampled_tokens=tokens,
        lookups=dict(proxy.tasks.counts),
        privacy=await asyncio.to_thread(_privacy_stats, proxy),
        ledger_bytes=await asyncio.to_thread(ledger.num_bytes),
        ledger_dropped=ledger.health.dropped,
        ledger_error=ledger.health.error,
    )


def _privacy_stats(proxy: ProxyComponents) -> PrivacyStats:
    counts, state = proxy.ledger.forgotten.counts(), proxy.retention.state
    num_unsent = proxy.ledger.forgotten.num_unsent()
    return PrivacyStats(
        forgotten=counts.get(Cause.FORGOTTEN, 0),
        pruned=counts.get(Cause.PRUNED, 0),
        pruned_since_start=state.num_pruned,
        last_pruned_at=state.last_at,
        unsent=num_unsent,
        server_problem=proxy.forget_requests.problem if num_unsent else "",
        trouble=state.trouble,
    )


def _task_conflict(task_ids: list[str]) -> WireError:
    """Return the error (409) for a request to register tasks whose ids belong to another API key or
    to the proxy's dataset. The message says that no task of the request was registered."""
    names = ", ".join(map(repr, task_ids[:_MAX_SHOWN_IDS]))
    more = f" and {len(task_ids) - _MAX_SHOWN_IDS} more" if len(task_ids) > _MAX_SHOWN_IDS else ""
    message = (
        f"These task ids belong to another API key or to the proxy's dataset: {names}{more}. Use "
        "other ids, or the key that registered them. No task was registered."
    )
    return WireError(409, error_body(message, "ConflictError", 409, "tasks"))


def _parse_tasks(raw: bytes) -> list[Task]:
    """Parse the body of a request to register tasks. Raises WireError (400) if the body is not
    valid. Raises WireError (400) as well for a value that the ledger cannot store: NaN, infinity or
    an unpaired surrogate character."""
    try:
        return PutTasks.model_validate(parse_json(raw)).tasks
    except ValidationError as error:
        raise schema_error([dict(problem) for problem in error.errors(include_url=False)]) from None
