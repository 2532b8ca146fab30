"""How many steps, of which tasks, and what an episode was worth. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fakevllm.admission.dataset import endless_rows
from fakevllm.errors import ConfigError, UserError
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import MAX_REWARD, Task, WorkflowOutput


def num_steps(job: TrainJob, epochs: int | None, num_tasks: int) -> int:
    """Raises ConfigError where nothing says when it ends, or it ends before the first step."""
    if job.total_training_steps is None and epochs is None:
        raise ConfigError(
            "Nothing says when training ends: set job.total_training_steps, or train.epochs."
        )
    limits = [job.total_training_steps] if job.total_training_steps is not None else []
    if epochs is not None:
        limits.append(epochs * num_tasks // job.batch_size)
    if not min(limits):
        raise ConfigError(
            f"{epochs} times {num_tasks} tasks are fewer than job.batch_size {job.batch_size}, and "
            "make no step: lower that, or raise train.epochs."
        )
    return min(limits)


def windows(
    tasks: Sequence[Task], job: TrainJob, steps_done: int, played: Mapping[str, int] | None = None
) -> Iterator[list[Task]]:
    """Endlessly the tasks of a step, each as often as it is played; shuffled anew each time
    through. Those of steps that were made before are left out, so a resumed run goes on in the
    dataset where it was; and of the first step's, how many of each task id were `played` and wait
    for it.

    >>> job = TrainJob(batch_size=2, num_repeat=2)
    >>> sorted(task.task_id for task in next(windows([Task(task_id=i) for i in "ab"], job, 0)))
    ['a', 'a', 'b', 'b']
    """
    rows = endless_rows(tasks, job.seed, skip=steps_done * job.batch_size)
    waiting = Counter(played or {})
    while True:
        batch = [task for _, task in itertools.islice(rows, job.batch_size)]
        window = [task for task in batch for _ in range(job.num_repeat)]
        if needed := _without(window, waiting):
            yield needed
        waiting.clear()


def _without(window: Sequence[Task], played: Counter[str]) -> list[Task]:
    left, needed = played.copy(), list[Task]()
    for task in window:
        if left[task.task_id]:
            left[task.task_id] -= 1
        else:
            needed.append(task)
    return needed


def told_drops(dropped: Mapping[str, int]) -> str:
    """Why a batch made no step.

    >>> told_drops({"tied": 2})
    'no step: 2 groups tied'
    """
    told = ", ".join(f"{num} groups {reason}" for reason, num in dropped.items())
    return f"no step: {told or 'more groups are waited for'}"


def same_batches(running: TrainJob, wanted: TrainJob) -> bool:
    """Whether what is played for one makes the other's steps."""
    return (running.batch_size, running.num_repeat) == (wanted.batch_size, wanted.num_repeat)


def output_of(returned: object, workflow: str) -> WorkflowOutput:
    """What a workflow returned, as the server is told of it. Raises UserError for what is no
    reward: to run it again would end the same way."""
    output = returned
    if isinstance(returned, int | float) and abs(returned) <= MAX_REWARD:
        output = WorkflowOutput(reward=float(returned))
    if isinstance(output, WorkflowOutput) and isinstance(output.reward, int | float):
        return output
    got = repr(returned)[:80]
    raise UserError(
        f"{workflow} returned {got}: let it return its reward, one finite number up to "
        f"{MAX_REWARD:g}, or a fakevllm.WorkflowOutput with one."
    )
