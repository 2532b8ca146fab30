"""All that is shown of a server at one moment, made of its replies. Pure, the clock passed in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from fakevllm.overwatch.history import Evaluated, History, LogLine, Step
from fakevllm.overwatch.words import seconds_of
from fakevllm_adapters.protocol.packed_numbers import jsonable_number
from fakevllm_adapters.protocol.pool import PoolInformation
from fakevllm_adapters.protocol.swarm import EngineStatusReply

AWAY = "AWAY"
"""Our word for a server that does not answer, or not us."""
RATE_STEPS = 5
"""Steps that a speed is the mean of."""


@dataclass(frozen=True, slots=True)
class Batch:
    """How full the batch is that is being collected."""

    method: str
    tasks: int
    tasks_wanted: int
    """0 where the method counts episodes alone."""
    tasks_with_signal: int
    episodes: int
    episodes_wanted: int


@dataclass(frozen=True, slots=True)
class TaskProgress:
    task_id: str
    ended: int
    wanted: int
    running: int
    """Of those that named their task at the claim."""
    rewards: tuple[float, ...]

    @property
    def is_whole(self) -> bool:
        return self.ended >= self.wanted

    @property
    def mean(self) -> float | None:
        """Not `fmean`, which raises where a sum is beyond any float."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True)
class RunningEpisode:
    uuid: str
    task_id: str
    client: str
    calls: int
    idle_s: float
    idle_limit_s: float | None
    """After which the server takes the claim back; None where it tells none."""


@dataclass(frozen=True, slots=True)
class ClientSeen:
    uuid: str
    idle_s: float | None
    has_agreed: bool
    running: int


@dataclass(frozen=True, slots=True)
class CurvePoint:
    step: int
    reward: float


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """Of the episodes that measured the weights at the end of a step."""

    step: int
    reward: float
    low: float
    high: float
    episodes: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Means over the last steps."""

    sampled_per_s: float
    trained_per_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Notice:
    """What a client said to all."""

    at: float
    tag: str
    message: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    url: str
    at: float
    """Unix seconds, of ours."""
    state: str
    """Of the engine, such as ROLLING; AWAY where the server does not answer."""
    trouble: str | None = None
    """Why the server's answer is not there. All else is then of `seen_at`."""
    seen_at: float | None = None
    detail: str | None = None
    """What the server says is wrong."""
    closed: str | None = None
    """Why no more steps are taken; None while they are."""
    step: int | None = None
    version: int = 0
    model: str | None = None
    run_id: str = ""
    is_paused: bool = False
    booting_s: float | None = None
    batch: Batch | None = None
    tasks: tuple[TaskProgress, ...] = ()
    running: tuple[RunningEpisode, ...] = ()
    """Longest idle first."""
    clients: tuple[ClientSeen, ...] = ()
    waiting: Mapping[str, int] | None = None
    dropped: Mapping[str, int] | None = None
    totals: Mapping[str, float] | None = None
    """Of the run."""
    metrics: Mapping[str, float] | None = None
    """Of the last step."""
    curve: tuple[CurvePoint, ...] = ()
    evaluations: tuple[EvaluationPoint, ...] = ()
    speed: Speed | None = None
    lines: tuple[LogLine, ...] = ()
    notices: tuple[Notice, ...] = ()

    @property
    def is_away(self) -> bool:
        return self.state == AWAY

    def as_json(self) -> dict[str, Any]:
        """Numbers that are none are told by name, as in the run's log."""
        return _finite(asdict(self))


def away(url: str, at: float, why: str, before: Snapshot | None) -> Snapshot:
    """What was seen last stays, with the word that it is old."""
    known = before or Snapshot(url, at, AWAY)
    return replace(known, at=at, state=AWAY, trouble=why)


def taken(
    url: str,
    at: float,
    status: EngineStatusReply,
    pool: PoolInformation | None,
    history: History,
    notices: Sequence[Notice] = (),
) -> Snapshot:
    """`pool` is None where the server tells none."""
    pool_told = pool or PoolInformation()
    running = tuple(sorted(_running(pool_told), key=lambda one: -one.idle_s))
    last = history.steps[-1] if history.steps else None
    began_at = pool_told.booting_start_time
    return Snapshot(
        url=url,
        at=at,
        state=str(status.engine_status).removeprefix("ENGINE."),
        seen_at=at,
        detail=status.engine_status_detail,
        closed=status.closed,
        step=status.global_step,
        version=status.weight_version,
        model=status.model,
        run_id=status.run_id,
        is_paused=status.claims_paused,
        booting_s=None if began_at is None else max(0.0, at - began_at),
        batch=None if pool is None else _batch(pool),
        tasks=tuple(_tasks(pool_told, running)),
        running=running,
        clients=tuple(_clients(pool_told, running, at)),
        waiting=status.waiting,
        dropped=status.dropped,
        totals=status.totals,
        metrics=None if last is None else last.metrics,
        curve=tuple(_curve(history.steps)),
        evaluations=tuple(_evaluations(history.evaluated)),
        speed=_speed(history.steps[-RATE_STEPS:]),
        lines=history.lines,
        notices=tuple(notices),
    )


def _batch(pool: PoolInformation) -> Batch:
    return Batch(
        method=pool.sample_collection_method,
        tasks=pool.completed_tasks,
        tasks_wanted=pool.completed_task_target,
        tasks_with_signal=pool.completed_non_dummy_tasks,
        episodes=pool.completed_episodes,
        episodes_wanted=pool.completed_episode_target,
    )


def _tasks(pool: PoolInformation, running: Sequence[RunningEpisode]) -> Iterator[TaskProgress]:
    """Those under way first, the fullest before the others."""
    at_play = Counter(one.task_id for one in running if one.task_id)
    ended = {name: len(of) for name, of in pool.completed_tasks_details.items()}
    names = sorted(
        {**ended, **at_play},
        key=lambda name: (ended.get(name, 0) >= pool.task_expected_num_repeat, -ended.get(name, 0)),
    )
    for name in names:
        yield TaskProgress(
            name,
            ended.get(name, 0),
            pool.task_expected_num_repeat,
            at_play[name],
            tuple(pool.completed_tasks_rewards.get(name, ())),
        )


def _running(pool: PoolInformation) -> Iterator[RunningEpisode]:
    for uuid, told in (pool.running_episode_details or {}).items():
        limit_s = seconds_of(told.get("discard_episode_timeout", ""))
        yield RunningEpisode(
            uuid,
            told.get("optional_task_id", ""),
            told.get("client_uuid", ""),
            int(seconds_of(told.get("llm_call_count", "")) or 0),
            seconds_of(told.get("time_since_last_activity", "")) or 0.0,
            limit_s if limit_s and limit_s > 0 else None,
        )


def _clients(
    pool: PoolInformation, running: Sequence[RunningEpisode], at: float
) -> Iterator[ClientSeen]:
    """Those with a say in the step, then those that only play."""
    at_play = Counter(one.client for one in running if one.client)
    told: list[dict[str, Any]] = (pool.swarm_client_instruction or {}).get("active_clients", [])
    for one in told:
        uuid = str(one.get("client_uuid", ""))
        last = one.get("last_activity_at")
        idle_s = max(0.0, at - last) if isinstance(last, int | float) else None
        yield ClientSeen(uuid, idle_s, bool(one.get("allowed_sync_weight")), at_play.pop(uuid, 0))
    for uuid, number in at_play.items():
        idle_s = min(one.idle_s for one in running if one.client == uuid)
        yield ClientSeen(uuid, idle_s, False, number)


def _curve(steps: Iterable[Step]) -> Iterator[CurvePoint]:
    for step in steps:
        if "reward_mean" in step.metrics:
            yield CurvePoint(step.number, step.metrics["reward_mean"])


def _evaluations(evaluated: Iterable[Evaluated]) -> Iterator[EvaluationPoint]:
    for one in evaluated:
        mean = one.total / one.episodes
        yield EvaluationPoint(one.step, mean, one.low, one.high, one.episodes)


def _speed(steps: Sequence[Step]) -> Speed | None:
    """Only of steps whose time is known: the first of a life has none."""
    timed = [step.metrics for step in steps if step.metrics.get("step_seconds", 0.0) > 0]
    if not timed:
        return None
    seconds = sum(one["step_seconds"] for one in timed)
    return Speed(
        sum(one.get("tokens_sampled", 0.0) for one in timed) / seconds,
        sum(one.get("tokens_trained", 0.0) for one in timed) / seconds,
        seconds / len(timed),
    )


def _finite(told: Any) -> Any:
    if isinstance(told, float):
        return jsonable_number(told)
    if isinstance(told, dict):
        return {name: _finite(value) for name, value in cast(dict[str, Any], told).items()}
    if isinstance(told, list | tuple):
        return [_finite(value) for value in cast(Sequence[Any], told)]
    return told
