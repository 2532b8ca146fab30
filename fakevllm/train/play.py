"""Plays the tasks: a step's episodes, then the step, then the next step's."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fakevllm.errors import FakevllmError, UserError
from fakevllm.sdk.access import EpisodeAccess
from fakevllm.sdk.client import SwarmClient
from fakevllm.sdk.episode_calls import EpisodeType
from fakevllm.sdk.executors import Retrier, run_episodes_until_all_complete
from fakevllm.sdk.types import ServerUnreachable, SwarmServerOfflineError
from fakevllm.train import plan
from fakevllm.train.screen import Screen
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.pool import ThrottlePolicy
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, Task, WorkflowOutput

LOOK_EVERY_S = 0.1
MAX_BARREN = 10
"""Batches in a row that leave neither a step nor a group that waits for one."""
TRAINS_NO_MORE = {"training_stopped", "training_refused"}
"""Why groups are dropped once no step will be made of them."""


class Stopped(SwarmServerOfflineError):
    """The command ends; as where the engine was stopped, nothing is run again."""


@dataclass(frozen=True, slots=True)
class Material:
    """What is played, and for how long."""

    job: TrainJob
    workflow: Callable[..., Any]
    """(task, access) -> WorkflowOutput or a number, or one that is awaited for it."""
    name: str
    tasks: Sequence[Task]
    eval_tasks: Sequence[Task]
    num_steps: int
    max_parallel: int


@dataclass(slots=True)
class Outcome:
    steps_before: int
    """Made by earlier runs of the command."""
    rewards: list[float] = field(default_factory=list[float])
    """The mean of what was played, a step each."""
    before: float | None = None
    """The mean reward of the evaluation, where there is one."""
    after: float | None = None


class Play:
    """One life of the command, in a thread of its own: `stop` may be called from another."""

    def __init__(self, url: str, material: Material, screen: Screen, folder: Path | None) -> None:
        """`folder`: of a server of our own, which is just being started; it keeps what a resumed
        run wants to know."""
        self._url = url
        self._material = material
        self._screen = screen
        self._folder = folder
        self._is_ours = folder is not None
        self._client: SwarmClient
        self._retries = Retrier(self._pause, final_errors=(SwarmServerOfflineError, UserError))
        self._stopping = threading.Event()
        self._mistake: UserError | None = None

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> Outcome:
        """Raises UserError, FakevllmError, SwarmError; Stopped after `stop`."""
        with SwarmClient(self._url) as self._client:
            try:
                return self._run()
            finally:
                self.stop()  # whoever still plays has nobody to play for

    def _run(self) -> Outcome:
        self._screen.phase("starting the engine")
        self._start()
        known = self._settled()
        outcome = Outcome((known.global_step or 1) - 1)
        self._screen.begin(outcome.steps_before)
        outcome.before = self._before(outcome.steps_before)
        self._screen.phase("training")
        self._train(outcome)
        outcome.after = self._evaluated("after")
        self._screen.phase("done")
        return outcome

    def _start(self) -> None:
        running, ours = self._running_job(), self._material.job
        if running is None:
            return
        last = running.total_training_steps
        if last is not None and last < self._material.num_steps:
            raise UserError(
                f"The server's job ends at step {last}, before step {self._material.num_steps}: "
                "stop its engine first."
            )
        if plan.same_batches(running, ours):
            return
        raise UserError(
            f"The server's engine runs with batch_size {running.batch_size} and num_repeat "
            f"{running.num_repeat}, not {ours.batch_size} and {ours.num_repeat}: name these in the "
            "job, or stop that engine first."
        )

    def _running_job(self) -> TrainJob | None:
        """Of the engine, once it runs. A server of our own that does not answer is just being
        started, or was killed meanwhile and is started again."""
        while True:
            try:
                if self._is_ours:
                    self._client.status()
                self._client.auto_sync_train_config_and_start_engine(
                    self._material.job, force_restart=self._is_ours and self._has_old_job()
                )
                return self._client.get_train_config()
            except ServerUnreachable:
                if not self._is_ours:
                    raise
            self._pause(LOOK_EVERY_S)

    def _has_old_job(self) -> bool:
        """Of a run that crashed, whose file was edited since: the server took it up."""
        running, wanted = self._client.get_train_config(), self._material.job
        named = wanted.model_fields_set
        return running is not None and running.model_dump(include=named) != wanted.model_dump(
            include=named
        )

    def _train(self, outcome: Outcome) -> None:
        done, num_steps = outcome.steps_before, self._material.num_steps
        known, looked_at = self._settled(), time.monotonic()
        num_barren = 0
        waiting = self._client.get_rollout_stat().completed_tasks_details
        played = {task_id: len(uuids) for task_id, uuids in waiting.items()}
        for window in plan.windows(self._material.tasks, self._material.job, done, played):
            if done >= num_steps:
                return
            rewards = self._played(window, "train", done)
            before, known = known, self._settled()
            dropped = Counter(known.dropped) - Counter(before.dropped)
            if dropped.keys() & TRAINS_NO_MORE:
                raise FakevllmError("The server trains no more: see its log for the reason.")
            now = time.monotonic()
            made, done = (known.global_step or 1) - 1 - done, (known.global_step or 1) - 1
            rate = (_sampled(known) - _sampled(before)) / max(now - looked_at, 1e-9)
            looked_at = now
            if made:
                num_barren = 0
                outcome.rewards.append(fmean(rewards))
                self._screen.step(done, fmean(rewards), rate)
                continue
            told = plan.told_drops(dropped)
            self._screen.line(told)
            num_barren = 0 if known.waiting.get("finished_groups") else num_barren + 1
            if num_barren >= MAX_BARREN:
                raise FakevllmError(f"Nothing can be trained of {MAX_BARREN} batches, {told}")

    def _before(self, steps_before: int) -> float | None:
        """A resumed run keeps the one it began with."""
        file = None if self._folder is None else self._folder / "eval_before.json"
        if file is not None and file.exists():
            return float(json.loads(file.read_text())["reward_mean"])
        return None if steps_before else self._evaluated("before")

    def _evaluated(self, name: str) -> float | None:
        tasks = self._material.eval_tasks
        if not tasks:
            return None
        self._screen.phase(f"evaluating {name} training")
        mean = fmean(self._played(tasks, "eval", 0))
        if self._folder is not None:
            aside = self._folder / f"eval_{name}.tmp"  # or a run that is killed here leaves half
            aside.write_text(json.dumps({"reward_mean": mean, "tasks": len(tasks)}))
            aside.replace(aside.with_suffix(".json"))
        return mean

    def _played(self, tasks: Sequence[Task], kind: EpisodeType, steps_done: int) -> list[float]:
        num_played = itertools.count(1)

        def play(task: Task) -> float:
            reward = self._episode(task, kind)
            if kind == "train":
                self._screen.part(steps_done + next(num_played) / len(tasks))
            return reward

        run = self._retries.wrap(play)
        parallel = min(self._material.max_parallel, len(tasks))
        try:
            return run_episodes_until_all_complete(tasks, run, parallel, auto_retry=False)
        except SwarmServerOfflineError:
            if self._mistake is not None:
                raise self._mistake from None
            self._settled()  # raises, with the reason
            raise

    def _episode(self, task: Task, kind: EpisodeType) -> float:
        self._pause(0)
        try:
            policy = ThrottlePolicy(current_task_id=task.task_id)  # no share: it is told, no more
            with self._client.episode(task, episode_type=kind, throttle_policy=policy) as episode:
                output = self._worth(self._returned(task, episode.access))
                episode.end_with(output)
        except Exception:
            self._pause(0)  # what fails because the server is gone is nobody's mistake
            raise
        assert isinstance(output.reward, int | float), "output_of sees to it"
        return float(output.reward)

    def _returned(self, task: Task, access: EpisodeAccess) -> object:
        try:
            returned = self._material.workflow(task, access)
            return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned
        except asyncio.CancelledError as error:  # no Exception, so it would end all
            raise RuntimeError("the workflow was cancelled, and not by us") from error

    def _worth(self, returned: object) -> WorkflowOutput:
        """A mistake ends the other episodes too."""
        try:
            return plan.output_of(returned, self._material.name)
        except UserError as mistake:
            self._mistake = mistake
            self._stopping.set()
            raise

    def _settled(self) -> EngineStatusReply:
        """Once no step is due or made: so each is sampled with the weights of the one before."""
        while True:
            self._pause(LOOK_EVERY_S)
            try:
                known = self._client.status()
            except ServerUnreachable:
                continue
            if known.engine_status is EngineStatus.OFFLINE:
                why = known.engine_status_detail or "somebody stopped it"
                raise FakevllmError(f"The engine is off: {why}")
            if known.engine_status is EngineStatus.ROLLING and known.backlog < 1:
                if known.engine_status_detail:
                    raise FakevllmError(f"Nothing is trained: {known.engine_status_detail}")
                return known

    def _pause(self, seconds: float) -> None:
        """Raises Stopped."""
        if self._stopping.wait(seconds):
            raise Stopped("the command ends")


def _sampled(known: EngineStatusReply) -> float:
    return known.totals.get("tokens_sampled", 0.0)


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned
