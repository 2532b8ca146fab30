"""Load the tasks of a dataset: a JSON Lines file, a CSV file, or a function that returns tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from fakevllm.errors import ConfigError
from fakevllm.sdk.task_readers import CsvReader, JsonlReader
from fakevllm.train.user_workflow import describe_error, load_function
from fakevllm_adapters.protocol.swarm import Task


def load_tasks(spec: str, field: str, folder: Path) -> list[Task]:
    """Load the tasks of a dataset.

    `spec` is the path of a JSON Lines or CSV file, or the name of a function that returns tasks,
    written as `FILE.py:FUNCTION`. Paths are relative to `folder`. `field` is the column that
    contains the text of a task. Raises ConfigError if the dataset cannot be loaded or is empty.
    Raises ConfigError as well if a task has no id, or if two tasks have the same id.
    """
    if ".py:" in spec:
        tasks = _call_task_function(spec, load_function(spec, folder))
    elif spec.endswith(".csv"):
        tasks = list(CsvReader(folder / spec, field))
    else:
        tasks = list(JsonlReader(folder / spec, field))
    if not tasks:
        raise ConfigError(f"The dataset {spec} has no rows.")
    _check_ids(spec, tasks)
    return tasks


def _call_task_function(spec: str, make_tasks: Callable[[], Any]) -> list[Task]:
    try:
        returned: Iterable[Any] = make_tasks()
        tasks = list(returned)
    except ConfigError:
        raise
    except Exception as error:  # translated: the function is the user's code
        raise ConfigError(f"{spec} raised {describe_error(error)}.") from error
    if not all(isinstance(task, Task) for task in tasks):
        raise ConfigError(f"{spec} must return tasks: a reader, or a list of fakevllm.Task.")
    return cast(list[Task], tasks)


def _check_ids(spec: str, tasks: list[Task]) -> None:
    """Raise ConfigError if a task has no id, or if two tasks have the same id.

    Each task needs its own id, because episodes with the same task id form a group. Rewards are
    compared within a group.
    """
    known: set[str] = set()
    for task in tasks:
        if not task.task_id:
            raise ConfigError(f"{spec} has a task without task_id: give each task its own.")
        if task.task_id in known:
            raise ConfigError(
                f"{spec} has two tasks with the task_id {task.task_id!r}: give each task its own."
            )
        known.add(task.task_id)
