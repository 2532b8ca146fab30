"""The number of steps of a training run, and the tasks of each step. This module does no I/O."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fakevllm.admission.dataset import endless_rows
from fakevllm.errors import ConfigError
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import Task


def num_steps(job: TrainJob, epochs: int | None, num_tasks: int) -> int:
    """Return the number of training steps of the whole run.

    The number is the smaller of two limits: `job.total_training_steps`, and the number of full
    batches in `epochs` passes over the dataset. If one limit is None, only the other limit applies.
    Raises ConfigError if both limits are None, or if the result is 0.
    """
    if job.total_training_steps is None and epochs is None:
        raise ConfigError(
            "The length of the training is not set: set job.total_training_steps or train.epochs."
        )
    limits = [job.total_training_steps] if job.total_training_steps is not None else []
    if epochs is not None:
        limits.append(epochs * num_tasks // job.batch_size)
    if not min(limits):
        raise ConfigError(
            f"The dataset is too small for one step: {epochs} epochs of {num_tasks} tasks are "
            f"fewer than job.batch_size {job.batch_size}. Lower job.batch_size, or raise "
            "train.epochs."
        )
    return min(limits)


def step_tasks(
    tasks: Sequence[Task], job: TrainJob, steps_done: int, played: Mapping[str, int] | None = None
) -> Iterator[list[Task]]:
    """Yield one list of tasks per training step, without end.

    A list contains `job.batch_size` tasks, each repeated `job.num_repeat` times. Each pass over the
    dataset has a new random order. The first `steps_done` steps are skipped, so that a resumed run
    continues at its position in the dataset.

    When a run is resumed, some episodes of the next step may have ended already. `played` maps each
    task id to the number of the task's ended episodes. The first list leaves out the task that many
    times.

    >>> job = TrainJob(batch_size=2, num_repeat=2)
    >>> sorted(task.task_id for task in next(step_tasks([Task(task_id=i) for i in "ab"], job, 0)))
    ['a', 'a', 'b', 'b']
    """
    rows = endless_rows(tasks, job.seed, skip=steps_done * job.batch_size)
    waiting = Counter(played or {})
    while True:
        batch = [task for _, task in itertools.islice(rows, job.batch_size)]
        repeated = [task for task in batch for _ in range(job.num_repeat)]
        if remaining := _without_played(repeated, waiting):
            yield remaining
        waiting.clear()


def _without_played(tasks: Sequence[Task], played: Counter[str]) -> list[Task]:
    """Return the tasks whose episodes have not ended yet. `tasks` may contain a task several times,
    once for each episode. `played` maps each task id to the number of the task's ended episodes.
    The task is left out that many times."""
    left, remaining = played.copy(), list[Task]()
    for task in tasks:
        if left[task.task_id]:
            left[task.task_id] -= 1
        else:
            remaining.append(task)
    return remaining


def explain_missing_step(dropped: Mapping[str, int]) -> str:
    """Return a text that says why a batch of episodes led to no training step. `dropped` maps each
    reason for which the server dropped groups of the batch to the number of these groups.

    >>> explain_missing_step({"tied": 2})
    'no step: 2 groups tied'
    """
    reasons = ", ".join(f"{count} groups {reason}" for reason, count in dropped.items())
    return f"no step: {reasons or 'the server waits for more groups'}"


def has_same_batches(running: TrainJob, wanted: TrainJob) -> bool:
    """Return True if both jobs have the same number of tasks per step and the same number of
    episodes per task."""
    return (running.batch_size, running.num_repeat) == (wanted.batch_size, wanted.num_repeat)
