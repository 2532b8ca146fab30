"""Run the agent's episodes, step by step, until the last training step is trained.

The episodes of a step begin only after the previous step has been trained. Therefore all of them
are sampled with the newest weights.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from fakevllm.errors import FakevllmError, UserError
from fakevllm.sdk.client import SwarmClient
from fakevllm.sdk.episode import EpisodeAccess
from fakevllm.sdk.episode_calls import EpisodeType
from fakevllm.sdk.episode_executors import Retrier, run_episodes_until_all_complete
from fakevllm.sdk.types import ServerUnreachable, SwarmServerOfflineError
from fakevllm.train import step_schedule
from fakevllm.train.progress_display import ProgressDisplay
from fakevllm.train.training_inputs import TrainingInputs
from fakevllm.train.user_workflow import parse_workflow_output
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.batch_status import ThrottlePolicy
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply, Task, WorkflowOutput

POLL_INTERVAL_S = 0.1
MAX_BATCHES_WITHOUT_STEP = 10
"""The run fails after this many consecutive batches of episodes without effect. A batch has no
effect if no training step follows, and if no group waits for training after the batch."""
FINAL_DROP_REASONS = {"training_stopped", "training_refused"}
"""If the server drops groups for one of these reasons, the server trains no more steps."""


class Stopped(SwarmServerOfflineError):
    """Raised in the threads of the rollout loop after `stop` was called. An episode that this error
    ends is not retried."""


@dataclass(slots=True)
class Outcome:
    steps_before: int
    """Number of steps that earlier runs of this command have trained."""
    rewards: list[float] = field(default_factory=list[float])
    """For each step that this run trained: the mean reward of the step's episodes."""
    eval_before: float | None = None
    """Mean reward of the evaluation before training; None without evaluation."""
    eval_after: float | None = None
    """Mean reward of the evaluation after training; None without evaluation."""


class RolloutLoop:
    """The loop of one `fakevllm train` command. It runs episodes until the last step is trained.
    Call `run` in a thread of its own. Any thread may call `stop`."""

    def __init__(
        self, url: str, inputs: TrainingInputs, display: ProgressDisplay, run_dir: Path | None
    ) -> None:
        """Create the loop. `run_dir` is the run directory of the server if this command has started
        the server, else None. The results of evaluations are stored in `run_dir`. A resumed run
        reads the result of the evaluation before training from `run_dir`."""
        self._url = url
        self._inputs = inputs
        self._display = display
        self._run_dir = run_dir
        self._owns_server = run_dir is not None
        self._client: SwarmClient
        self._retrier = Retrier(self._sleep, final_errors=(SwarmServerOfflineError, UserError))
        self._stop_requested = threading.Event()
        self._workflow_error: UserError | None = None
        """Error of a workflow that returned no valid reward, else None. Such an error ends all
        episodes."""

    def stop(self) -> None:
        self._stop_requested.set()

    def run(self) -> Outcome:
        """Run episodes until the last step is trained. Return the mean rewards of the steps and of
        the evaluations.

        Raises Stopped if `stop` was called. Raises UserError, FakevllmError or SwarmError if
        training cannot continue.
        """
        with SwarmClient(self._url) as self._client:
            try:
                return self._run()
            finally:
                self.stop()  # ends episodes that still run in other threads

    def _run(self) -> Outcome:
        self._display.show_phase("starting the engine")
        self._ensure_engine_runs()
        status = self._wait_until_collecting()
        outcome = Outcome((status.global_step or 1) - 1)
        self._display.show_earlier_steps(outcome.steps_before)
        outcome.eval_before = self._evaluate_before(outcome.steps_before)
        self._display.show_phase("training")
        self._train(outcome)
        outcome.eval_after = self._evaluate("after")
        self._display.show_phase("done")
        return outcome

    def _ensure_engine_runs(self) -> None:
        """Start the engine with this run's job, unless an engine is running already. Raises
        UserError if an engine runs with a job that does not fit this run. A job does not fit if it
        ends before this run's last step, or if its steps have another number of tasks or episodes.
        """
        running, wanted = self._start_engine(), self._inputs.job
        if running is None:
            return
        last_step = running.total_training_steps
        if last_step is not None and last_step < self._inputs.num_steps:
            raise UserError(
                f"The server's job ends at step {last_step}, before step {self._inputs.num_steps}: "
                "stop its engine first."
            )
        if step_schedule.has_same_batches(running, wanted):
            return
        raise UserError(
            f"The server's engine runs with batch_size {running.batch_size} and num_repeat "
            f"{running.num_repeat}, not {wanted.batch_size} and {wanted.num_repeat}: write the "
            "server's values into the job, or stop that engine first."
        )

    def _start_engine(self) -> TrainJob | None:
        """Return the job with which the engine runs. If the engine is off, start it first.

        If this command started the server and the server does not answer, poll the server until it
        answers. Such a server is still booting, or is being restarted after a crash.
        """
        while True:
            try:
                if self._owns_server:
                    self._client.status()
                self._client.auto_sync_train_config_and_start_engine(
                    self._inputs.job, force_restart=self._owns_server and self._has_old_job()
                )
                return self._client.get_train_config()
            except ServerUnreachable:
                if not self._owns_server:
                    raise
            self._sleep(POLL_INTERVAL_S)

    def _has_old_job(self) -> bool:
        """Return True if the server's job differs from the job in the YAML file.

        A server resumes the job with which the server's run began. Therefore the jobs differ if the
        YAML file was edited after the run had begun.
        """
        running, wanted = self._client.get_train_config(), self._inputs.job
        keys = wanted.model_fields_set
        return running is not None and running.model_dump(include=keys) != wanted.model_dump(
            include=keys
        )

    def _train(self, outcome: Outcome) -> None:
        steps_done, num_steps = outcome.steps_before, self._inputs.num_steps
        status, polled_at = self._wait_until_collecting(), time.monotonic()
        batches_without_step = 0
        waiting = self._client.get_rollout_stat().completed_tasks_details
        num_played = {task_id: len(uuids) for task_id, uuids in waiting.items()}
        for tasks in step_schedule.step_tasks(
            self._inputs.tasks, self._inputs.job, steps_done, num_played
        ):
            if steps_done >= num_steps:
                return
            rewards = self._run_episodes(tasks, "train", steps_done)
            previous, status = status, self._wait_until_collecting()
            dropped = Counter(status.dropped) - Counter(previous.dropped)
            if dropped.keys() & FINAL_DROP_REASONS:
                raise FakevllmError("The server takes no more steps: see its log for the reason.")
            now = time.monotonic()
            num_sampled = _tokens_sampled(status) - _tokens_sampled(previous)
            tokens_per_s = num_sampled / max(now - polled_at, 1e-9)
            polled_at = now
            has_step = (status.global_step or 1) - 1 != steps_done
            steps_done = (status.global_step or 1) - 1
            if has_step:
                batches_without_step = 0
                outcome.rewards.append(fmean(rewards))
                self._display.show_step(steps_done, fmean(rewards), tokens_per_s)
                continue
            explanation = step_schedule.explain_missing_step(dropped)
            self._display.print_line(explanation)
            has_waiting_groups = bool(status.waiting.get("finished_groups"))
            batches_without_step = 0 if has_waiting_groups else batches_without_step + 1
            if batches_without_step >= MAX_BATCHES_WITHOUT_STEP:
                raise FakevllmError(
                    f"{MAX_BATCHES_WITHOUT_STEP} batches in a row could not be trained; the last "
                    f"one: {explanation}"
                )

    def _evaluate_before(self, steps_before: int) -> float | None:
        """Run the evaluation before the first training step, and return its mean reward. In a
        resumed run, do not evaluate. Return the stored mean reward instead, or None if none is
        stored."""
        file = None if self._run_dir is None else self._run_dir / "eval_before.json"
        if file is not None and file.exists():
            return float(json.loads(file.read_text())["reward_mean"])
        return None if steps_before else self._evaluate("before")

    def _evaluate(self, name: str) -> float | None:
        """Run the evaluation tasks. Store their mean reward in the run directory, and return the
        mean reward. Return None if there are no evaluation tasks."""
        tasks = self._inputs.eval_tasks
        if not tasks:
            return None
        self._display.show_phase(f"evaluating {name} training")
        mean = fmean(self._run_episodes(tasks, "eval", 0))
        if self._run_dir is not None:
            # Written to another name first, so that a killed run leaves no partial file.
            temporary = self._run_dir / f"eval_{name}.tmp"
            temporary.write_text(json.dumps({"reward_mean": mean, "tasks": len(tasks)}))
            temporary.replace(temporary.with_suffix(".json"))
        return mean

    def _run_episodes(
        self, tasks: Sequence[Task], kind: EpisodeType, steps_done: int
    ) -> list[float]:
        """Run one episode per task in parallel, and return the rewards in the order of the tasks.

        Episodes that fail are run again.
        """
        num_ended = itertools.count(1)

        def run_episode(task: Task) -> float:
            reward = self._run_episode(task, kind)
            if kind == "train":
                self._display.show_fraction(steps_done + next(num_ended) / len(tasks))
            return reward

        run = self._retrier.wrap(run_episode)
        max_parallel = min(self._inputs.max_parallel, len(tasks))
        try:
            return run_episodes_until_all_complete(tasks, run, max_parallel, auto_retry=False)
        except SwarmServerOfflineError:
            if self._workflow_error is not None:
                raise self._workflow_error from None
            self._wait_until_collecting()  # raises an error with the reason if the engine is off
            raise

    def _run_episode(self, task: Task, kind: EpisodeType) -> float:
        self._check_not_stopped()
        try:
            # The policy has no share. It only names the task, which the server's pool view shows.
            policy = ThrottlePolicy(current_task_id=task.task_id)
            with self._client.episode(task, episode_type=kind, throttle_policy=policy) as episode:
                output = self._check_output(self._call_workflow(task, episode.access))
                episode.end_with(output)
        except Exception:
            # After `stop`, an error is caused by the missing server, not by the workflow.
            self._check_not_stopped()
            raise
        assert isinstance(output.reward, int | float), "parse_workflow_output checks the reward"
        return float(output.reward)

    def _call_workflow(self, task: Task, access: EpisodeAccess) -> object:
        try:
            returned = self._inputs.workflow(task, access)
            return asyncio.run(_await(returned)) if inspect.isawaitable(returned) else returned
        except asyncio.CancelledError as error:
            # CancelledError is no Exception, so it would end the whole run.
            raise RuntimeError("the workflow cancelled itself") from error

    def _check_output(self, returned: object) -> WorkflowOutput:
        """Return the result of a workflow as a WorkflowOutput. If the result has no valid reward,
        stop all other episodes and raise UserError."""
        try:
            return parse_workflow_output(returned, self._inputs.workflow_name)
        except UserError as error:
            self._workflow_error = error
            self._stop_requested.set()
            raise

    def _wait_until_collecting(self) -> EngineStatusReply:
        """Wait until the server collects episodes for the next training step, and until no step is
        due or running. Return the server's status.

        Raises FakevllmError if the engine is off, or if the server reports an error.
        """
        while True:
            self._sleep(POLL_INTERVAL_S)
            try:
                status = self._client.status()
            except ServerUnreachable:
                continue
            if status.engine_status is EngineStatus.OFFLINE:
                reason = status.engine_status_detail or "somebody stopped it"
                raise FakevllmError(f"The engine is off: {reason}")
            if status.is_between_steps:
                if status.engine_status_detail:
                    raise FakevllmError(f"Training has stopped: {status.engine_status_detail}")
                return status

    def _check_not_stopped(self) -> None:
        self._sleep(0)

    def _sleep(self, seconds: float) -> None:
        """Sleep for `seconds`. If `stop` has been called, or is called during the sleep, raise
        Stopped at once."""
        if self._stop_requested.wait(seconds):
            raise Stopped("the command was stopped")


def _tokens_sampled(status: EngineStatusReply) -> float:
    return status.totals.get("tokens_sampled", 0.0)


async def _await(returned: Awaitable[Any]) -> Any:
    return await returned
