"""The plan of a run: the number of steps, and the tasks of each step."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from fakevllm import Task, TrainJob
from fakevllm.errors import ConfigError
from fakevllm.train.step_schedule import num_steps, step_tasks

TASKS = [Task(task_id=str(number)) for number in range(6)]
JOB = TrainJob(batch_size=4, num_repeat=3)


@pytest.mark.parametrize(
    ("total", "epochs", "expected"), [(10, None, 10), (None, 2, 3), (10, 2, 3), (2, 2, 2)]
)
def test_training_ends_at_its_last_step_or_after_its_epochs_whichever_comes_first(
    total: int | None, epochs: int | None, expected: int
) -> None:
    job = TrainJob(batch_size=4, total_training_steps=total)
    assert num_steps(job, epochs, num_tasks=6) == expected


def test_a_run_without_an_end_or_without_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set job\.total_training_steps or train\.epochs"):
        num_steps(JOB, None, 6)
    with pytest.raises(ConfigError, match="too small for one step"):
        num_steps(JOB, 1, 3)


def test_each_task_of_a_step_is_repeated_num_repeat_times() -> None:
    for tasks in itertools.islice(step_tasks(TASKS, JOB, 0), 3):
        assert len(tasks) == 12 and all(
            count % 3 == 0 for count in Counter(task.task_id for task in tasks).values()
        )


def test_an_epoch_has_each_task_once() -> None:
    three_steps = list(itertools.chain(*itertools.islice(step_tasks(TASKS, JOB, 0), 3)))
    assert Counter(task.task_id for task in three_steps) == {str(number): 6 for number in range(6)}


def test_a_resumed_run_continues_at_its_place_in_the_dataset() -> None:
    all_steps = list(itertools.islice(step_tasks(TASKS, JOB, 0), 5))
    assert list(itertools.islice(step_tasks(TASKS, JOB, 2), 3)) == all_steps[2:]


def test_episodes_that_wait_for_the_first_step_are_not_run_again() -> None:
    first, second = itertools.islice(step_tasks(TASKS, JOB, 0), 2)
    complete, partial = first[0].task_id, first[3].task_id
    played = {complete: 3, partial: 1, "no such": 1}
    remaining, following = itertools.islice(step_tasks(TASKS, JOB, 0, played), 2)
    left_out = Counter(task.task_id for task in first)
    left_out -= Counter(task.task_id for task in remaining)
    assert left_out == {complete: 3, partial: 1}
    assert following == second
