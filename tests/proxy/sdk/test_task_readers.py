"""Readers of tasks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fakevllm import CsvReader, JsonlReader, RandomReader, RouterReader, TaskReader
from fakevllm.errors import ConfigError


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    file = tmp_path / "sums.jsonl"
    file.write_text('{"question": "1+1", "answer": "2"}\n{"question": "2+2", "answer": "4"}\n')
    return file


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "sums.csv"
    file.write_text('question,answer\n1+1,2\n"2,5+2",4.5\n')
    return file


def test_each_line_of_a_jsonl_file_is_a_task(jsonl: Path) -> None:
    first, second = JsonlReader(jsonl)
    assert (first.main_query, second.metadata["answer"]) == ("1+1", "4")


def test_each_row_of_a_csv_file_is_a_task(table: Path) -> None:
    first, second = CsvReader(table)
    assert (first.main_query, second.main_query) == ("1+1", "2,5+2")
    assert second.metadata == {"question": "2,5+2", "answer": "4.5"}


def test_a_byte_order_mark_does_not_hide_the_first_column(table: Path) -> None:
    table.write_text("\ufeff" + table.read_text())
    assert [task.main_query for task in CsvReader(table)] == ["1+1", "2,5+2"]


@pytest.mark.parametrize("row", ["3+3,6,seven", "3+3"])
def test_a_row_with_a_wrong_number_of_cells_is_reported_by_its_line(table: Path, row: str) -> None:
    table.write_text(f"{table.read_text()}{row}\n")
    with pytest.raises(ConfigError, match="cannot be read: line 4 has more or fewer cells"):
        CsvReader(table)


def test_task_ids_are_unique_and_the_same_in_each_iteration(jsonl: Path, table: Path) -> None:
    for make in (lambda: JsonlReader(jsonl), lambda: CsvReader(table), lambda: RandomReader(3)):
        reader = make()
        ids = [task.task_id for task in reader]
        assert ids == [task.task_id for task in make().generate_training_tasks()]
        assert ids == [task.task_id for task in reader] and len(set(ids)) == len(ids)


def test_files_with_one_name_have_different_task_ids(table: Path) -> None:
    other = table.parent / "other" / table.name
    other.parent.mkdir()
    other.write_text("question,answer\n5+5,10\n")
    assert not {one.task_id for one in CsvReader(table)} & {one.task_id for one in CsvReader(other)}


def test_a_router_makes_equal_task_ids_of_its_readers_unique() -> None:
    tasks = list(RouterReader({"a": RandomReader(3), "b": RandomReader(3)}))
    assert len({task.task_id for task in tasks}) == 6


@pytest.mark.parametrize("make", [JsonlReader, CsvReader])
def test_a_missing_field_is_reported_with_the_existing_ones(
    make: type[JsonlReader] | type[CsvReader], jsonl: Path, table: Path
) -> None:
    with pytest.raises(ConfigError, match="question, answer"):
        make(jsonl if make is JsonlReader else table, "prompt")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        CsvReader(tmp_path / "none.csv")


def test_a_router_interleaves_readers_evenly_by_their_shares() -> None:
    readers: dict[str, TaskReader] = {"a": RandomReader(40, 1), "b": RandomReader(100, 2)}
    tasks = list(RouterReader(readers, {"a": 0.4, "b": 0.6}))
    assert len(tasks) == 140
    for start in range(0, 90, 10):
        window = Counter(task.env_type for task in tasks[start : start + 10])
        assert window == {"a": 4, "b": 6}
    assert {task.env_type for task in tasks[100:]} == {"b"}


def test_shares_for_unknown_readers_are_refused() -> None:
    with pytest.raises(ValueError, match="same readers"):
        RouterReader({"a": RandomReader(1)}, {"b": 1.0})
