"""The snapshot of a swarm server: all data about the server that the screen shows at one moment. It
is built from the server's replies.

This module does no I/O. The current time is an argument. The output of `--json` has the names of a
snapshot's fields as its keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from fakevllm.overwatch.formatting import parse_seconds
from fakevllm.overwatch.history import EvaluationRewards, History, LogLine, Step
from fakevllm_adapters.protocol.batch_status import PoolInformation
from fakevllm_adapters.protocol.packed_numbers import jsonable_number
from fakevllm_adapters.protocol.swarm import EngineStatusReply, ReplicaStatus

AWAY = "AWAY"
"""State of a server whose last poll failed, because the server does not answer or refuses this
client. No engine reports this state."""
SPEED_STEPS = 5
"""Number of latest training steps over which a speed is averaged."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Progress of the batch that the server is collecting for the next training step."""

    method: str
    """The job's `swarm_mode_sample_collection_method`, which decides when a batch is complete."""
    tasks: int
    tasks_wanted: int
    """Number of tasks in a batch; 0 if the method counts only episodes."""
    tasks_with_signal: int
    """Number of completed tasks whose episodes did not all get the same reward."""
    episodes: int
    episodes_wanted: int


@dataclass(frozen=True, slots=True)
class TaskProgress:
    task_id: str
    ended: int
    wanted: int
    running: int
    """Number of running episodes whose claim named this task."""
    rewards: tuple[float, ...]

    @property
    def is_complete(self) -> bool:
        return self.ended >= self.wanted

    @property
    def mean(self) -> float | None:
        """Mean of the task's rewards, or None if there are no rewards yet. `statistics.fmean` is
        not used, because it raises an error if the sum exceeds the range of a float."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


@dataclass(frozen=True, slots=True)
class RunningEpisode:
    uuid: str
    task_id: str
    client: str
    calls: int
    idle_s: float
    idle_limit_s: float | None
    """Number of seconds without a running model call after which the server takes the episode back
    from its client; None if the server does not report the limit."""


@dataclass(frozen=True, slots=True)
class ClientActivity:
    uuid: str
    idle_s: float | None
    has_agreed: bool
    """Whether the client has agreed to the next training step. Some jobs begin a step only when all
    active clients have agreed."""
    running: int
    """Number of the client's running episodes."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    step: int
    reward: float
    changed: str = ""
    """What changed between the previous step and this step, such as `the hooks changed`; "" if
    nothing changed. The curve has a gap at a change."""


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """The rewards of the evaluation episodes of one training step: mean, lowest and highest. The
    episodes were sampled with the weights that this step produced."""

    step: int
    reward: float
    low: float
    high: float
    episodes: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Mean speeds over the last SPEED_STEPS training steps: sampled and trained tokens per second,
    and seconds per step."""

    sampled_per_s: float
    trained_per_s: float
    step_s: float


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that a client sent with `push_verbose_log`, for everybody who watches the
    server."""

    at: float
    """Unix time in seconds, by the server's clock."""
    tag: str
    message: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    url: str
    at: float
    """Unix time of the poll in seconds, by this machine's clock."""
    state: str
    """State of the engine, such as ROLLING; AWAY if the last poll failed."""
    trouble: str | None = None
    """Reason why the last poll failed; None if the poll succeeded. After a failure, all data except
    `at`, `state` and `trouble` are those of the last successful poll."""
    seen_at: float | None = None
    """Unix time of the last successful poll; None if no poll has succeeded yet."""
    detail: str | None = None
    """Error that the server reports; None if there is no error."""
    replicas: Sequence[ReplicaStatus] = ()
    """The server's rollout replicas; empty if it has one rollout engine."""
    closed: str | None = None
    """Reason why the run takes no more training steps; None while the run takes steps."""
    step: int | None = None
    version: int = 0
    released: int | None = None
    """Version of the weights that is released to answer apps; None if the server has not yet
    decided about the release of any version."""
    model: str | None = None
    run_id: str = ""
    is_paused: bool = False
    booting_s: float | None = None
    """Seconds since the engine began to boot; None if it is not booting."""
    batch: Batch | None = None
    """Progress of the batch for the next training step; None if the server does not report it."""
    tasks: tuple[TaskProgress, ...] = ()
    """Tasks of the batch. Incomplete tasks come before complete tasks. Among the incomplete tasks,
    and among the complete tasks, those with more ended episodes come first."""
    running: tuple[RunningEpisode, ...] = ()
    """Running episodes, ordered by idle time, the longest first."""
    clients: tuple[ClientActivity, ...] = ()
    waiting: Mapping[str, int] | None = None
    """Numbers of groups, tasks and tokens that the server holds and has not trained yet."""
    dropped: Mapping[str, int] | None = None
    """Number of groups that the run dropped, by reason."""
    totals: Mapping[str, float] | None = None
    """Counters of the whole run."""
    metrics: Mapping[str, float] | None = None
    """Metrics of the last step; None before the first step."""
    curve: tuple[CurvePoint, ...] = ()
    """Mean reward of each step."""
    evaluations: tuple[EvaluationPoint, ...] = ()
    speed: Speed | None = None
    """Mean speed of the last steps; None if the duration of no step is known."""
    lines: tuple[LogLine, ...] = ()
    notices: tuple[Notice, ...] = ()

    @property
    def is_away(self) -> bool:
        return self.state == AWAY

    def as_json(self) -> dict[str, Any]:
        """Return the snapshot as a dict for the output of `--json`. Numbers that are not finite
        become strings."""
        return _to_jsonable(asdict(self))


def away_snapshot(url: str, at: float, trouble: str, previous: Snapshot | None) -> Snapshot:
    """Return a snapshot for a server whose poll failed. The snapshot has the state AWAY and the
    reason `trouble`. All other data are copied from `previous`, the snapshot of the last successful
    poll. `previous` is None if no poll has succeeded."""
    known = previous or Snapshot(url, at, AWAY)
    return replace(known, at=at, state=AWAY, trouble=trouble)


def build_snapshot(
    url: str,
    at: float,
    status: EngineStatusReply,
    pool: PoolInformation | None,
    history: History,
    notices: Sequence[Notice] = (),
) -> Snapshot:
    """Return the snapshot of a server whose poll at the Unix time `at` succeeded.

    `pool` is the progress of the batch that the server is collecting. `pool` is None if the server
    has no route for this progress.
    """
    known_pool = pool or PoolInformation()
    running = tuple(sorted(_running_episodes(known_pool), key=lambda episode: -episode.idle_s))
    last_step = history.steps[-1] if history.steps else None
    booting_since = known_pool.booting_start_time
    return Snapshot(
        url=url,
        at=at,
        state=str(status.engine_status).removeprefix("ENGINE."),
        seen_at=at,
        detail=status.engine_status_detail,
        replicas=status.replicas,
        closed=status.closed,
        step=status.global_step,
        version=status.weight_version,
        released=status.released if status.num_releases else None,
        model=status.model,
        run_id=status.run_id,
        is_paused=status.claims_paused,
        booting_s=None if booting_since is None else max(0.0, at - booting_since),
        batch=None if pool is None else _batch(pool),
        tasks=tuple(_tasks(known_pool, running)),
        running=running,
        clients=tuple(_clients(known_pool, running, at)),
        waiting=status.waiting,
        dropped=status.dropped,
        totals=status.totals,
        metrics=None if last_step is None else last_step.metrics,
        curve=tuple(_curve(history.steps)),
        evaluations=tuple(_evaluations(history.evaluations)),
        speed=_speed(history.steps[-SPEED_STEPS:]),
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
    num_wanted = pool.task_expected_num_repeat
    num_running = Counter(episode.task_id for episode in running if episode.task_id)
    num_ended = {
        task_id: len(episodes) for task_id, episodes in pool.completed_tasks_details.items()
    }

    def sort_key(task_id: str) -> tuple[bool, int]:
        ended = num_ended.get(task_id, 0)
        return ended >= num_wanted, -ended

    for task_id in sorted({**num_ended, **num_running}, key=sort_key):
        yield TaskProgress(
            task_id,
            num_ended.get(task_id, 0),
            num_wanted,
            num_running[task_id],
            tuple(pool.completed_tasks_rewards.get(task_id, ())),
        )


def _running_episodes(pool: PoolInformation) -> Iterator[RunningEpisode]:
    for uuid, details in (pool.running_episode_details or {}).items():
        limit_s = parse_seconds(details.get("discard_episode_timeout", ""))
        yield RunningEpisode(
            uuid,
            details.get("optional_task_id", ""),
            details.get("client_uuid", ""),
            int(parse_seconds(details.get("llm_call_count", "")) or 0),
            parse_seconds(details.get("time_since_last_activity", "")) or 0.0,
            limit_s if limit_s and limit_s > 0 else None,
        )


def _clients(
    pool: PoolInformation, running: Sequence[RunningEpisode], at: float
) -> Iterator[ClientActivity]:
    """Yield the activity of each client. First come the clients that the server lists as active,
    because they take part in the current batch. Then come the other clients that have running
    episodes.
    """
    num_running = Counter(episode.client for episode in running if episode.client)
    instruction = pool.swarm_client_instruction or {}
    active_clients: list[dict[str, Any]] = instruction.get("active_clients", [])
    for client in active_clients:
        uuid = str(client.get("client_uuid", ""))
        active_at = client.get("last_activity_at")
        idle_s = max(0.0, at - active_at) if isinstance(active_at, int | float) else None
        has_agreed = bool(client.get("allowed_sync_weight"))
        yield ClientActivity(uuid, idle_s, has_agreed, num_running.pop(uuid, 0))
    for uuid, count in num_running.items():
        idle_s = min(episode.idle_s for episode in running if episode.client == uuid)
        yield ClientActivity(uuid, idle_s, False, count)


def _curve(steps: Iterable[Step]) -> Iterator[CurvePoint]:
    """Yield one point of the reward curve for each step that has a mean reward. A step may record a
    change, for example of the reward hooks. If such a step has no mean reward, the next point has
    the description of the change."""
    changed = ""
    for step in steps:
        changed = step.changed or changed
        if "reward_mean" in step.metrics:
            yield CurvePoint(step.number, step.metrics["reward_mean"], changed)
            changed = ""


def _evaluations(evaluations: Iterable[EvaluationRewards]) -> Iterator[EvaluationPoint]:
    for rewards in evaluations:
        mean = rewards.total / rewards.episodes
        yield EvaluationPoint(rewards.step, mean, rewards.low, rewards.high, rewards.episodes)


def _speed(steps: Sequence[Step]) -> Speed | None:
    """Return the mean speed over the steps whose duration is known. Return None if no duration is
    known.

    The duration of the first step after a start of the server is unknown.
    """
    timed = [step.metrics for step in steps if step.metrics.get("step_seconds", 0.0) > 0]
    if not timed:
        return None
    seconds = sum(metrics["step_seconds"] for metrics in timed)
    return Speed(
        sum(metrics.get("tokens_sampled", 0.0) for metrics in timed) / seconds,
        sum(metrics.get("tokens_trained", 0.0) for metrics in timed) / seconds,
        seconds / len(timed),
    )


def _to_jsonable(value: Any) -> Any:
    if isinstance(value, float):
        return jsonable_number(value)
    if isinstance(value, dict):
        items = cast(dict[str, Any], value).items()
        return {name: _to_jsonable(member) for name, member in items}
    if isinstance(value, list | tuple):
        return [_to_jsonable(member) for member in cast(Sequence[Any], value)]
    return value
