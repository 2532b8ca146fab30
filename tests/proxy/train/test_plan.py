"""How many steps, of which tasks, and what an episode was worth."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from fakevllm import Task, TrainJob, WorkflowOutput
from fakevllm.errors import ConfigError, UserError
from fakevllm.train.plan import num_steps, output_of, windows

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


def test_training_without_an_end_or_without_a_step_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match=r"set job\.total_training_steps, or train\.epochs"):
        num_steps(JOB, None, 6)
    with pytest.raises(ConfigError, match="make no step"):
        num_steps(JOB, 1, 3)


def test_a_window_is_a_steps_tasks_each_as_often_as_it_is_played() -> None:
    for window in itertools.islice(windows(TASKS, JOB, 0), 3):
        assert len(window) == 12 and all(
            count % 3 == 0 for count in Counter(task.task_id for task in window).values()
        )


def test_each_task_is_played_once_before_any_is_played_again() -> None:
    three = list(itertools.chain(*itertools.islice(windows(TASKS, JOB, 0), 3)))
    assert Counter(task.task_id for task in three) == {str(number): 6 for number in range(6)}


def test_a_resumed_run_goes_on_in_the_dataset_where_it_was() -> None:
    whole = list(itertools.islice(windows(TASKS, JOB, 0), 5))
    assert list(itertools.islice(windows(TASKS, JOB, 2), 3)) == whole[2:]


def test_what_was_played_and_waits_for_the_first_step_is_not_played_again() -> None:
    first, second = itertools.islice(windows(TASKS, JOB, 0), 2)
    whole, part = first[0].task_id, first[3].task_id
    got = list(itertools.islice(windows(TASKS, JOB, 0, {whole: 3, part: 1, "no such": 1}), 2))
    assert Counter(task.task_id for task in first) - Counter(t.task_id for t in got[0]) == {
        whole: 3,
        part: 1,
    }
    assert got[1] == second


@pytest.mark.parametrize("returned", [1, 0.5, True, WorkflowOutput(reward=1.0)])
def test_a_number_is_a_reward_and_so_is_an_output(returned: object) -> None:
    assert isinstance(output_of(returned, "agent.py:run").reward, float)


@pytest.mark.parametrize(
    "returned", [None, "1", float("nan"), WorkflowOutput(), WorkflowOutput(reward=[1.0])]
)
def test_what_is_no_reward_is_the_workflows_mistake(returned: object) -> None:
    with pytest.raises(UserError, match=r"^agent\.py:run returned .*: let it return its reward"):
        output_of(returned, "agent.py:run")
