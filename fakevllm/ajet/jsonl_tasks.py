"""Read tasks from a JSON Lines file whose rows have the fields of an AgentJet task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fakevllm.admission.dataset import DatasetRow, read_rows
from fakevllm.errors import ConfigError
from fakevllm_adapters.http.validation_messages import one_line
from fakevllm_adapters.protocol.swarm import Task

QUERY_FIELDS = ("main_query", "question")
"""Fields that may hold a task's query. If a row has both fields, `main_query` is used."""


def read_jsonl_tasks(file: Path) -> list[Task]:
    """Return one task per row of the file, in the order of the rows.

    A row needs the field `main_query` or `question`. The fields `task_id`, `init_messages`,
    `env_type` and `metadata` are optional. If a row has no `task_id`, the task's id is made of a
    hash of the file's content and the row's index. If a row has no `metadata`, the task's metadata
    is the whole row.

    Raises ConfigError in three cases. The file cannot be read, a row is not valid, or two rows with
    the same `task_id` have different queries. Equal ids require equal queries, because all episodes
    with one task id form a group and are compared with each other.
    """
    tasks: list[Task] = []
    first_by_id: dict[str, tuple[int, str]] = {}
    for row in read_rows(file):
        task = _task(row, file)
        line, query = first_by_id.setdefault(task.task_id, (row.line_number, task.main_query))
        if query != task.main_query:
            raise ConfigError(
                f"{file}, line {row.line_number}, has the same task_id as line {line} and another "
                "query: give each task its own task_id, or leave task_id out."
            )
        tasks.append(task)
    return tasks


def _task(row: DatasetRow, file: Path) -> Task:
    query_field = next((field for field in QUERY_FIELDS if field in row.fields), None)
    if query_field is None:
        raise ConfigError(
            f"{file}, line {row.line_number}, has no field {' or '.join(QUERY_FIELDS)} "
            f"(its fields: {row.field_names}): rename the field with the query."
        )
    optional = {
        name: row.fields[name]
        for name in ("init_messages", "env_type", "metadata")
        if row.fields.get(name) is not None
    }
    fields = {"main_query": row.fields[query_field], "task_id": _task_id(row)}
    try:
        return Task.model_validate({"metadata": row.fields, **fields, **optional})
    except ValidationError as error:
        problems = one_line(error.errors(include_url=False))
        raise ConfigError(f"{file}, line {row.line_number}, is no task: {problems}.") from None


def _task_id(row: DatasetRow) -> Any:
    """Return the row's field `task_id`, with a number converted to text. If the row has no such
    field, return an id made of a hash of the file's content and the row's index."""
    task_id = row.fields.get("task_id")
    if task_id is None or task_id == "":
        return row.row_id
    return str(task_id) if isinstance(task_id, int | float) else task_id
