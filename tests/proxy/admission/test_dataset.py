"""Tasks read from a dataset file."""

import json
from pathlib import Path

import pytest

from fakevllm.admission import dataset
from fakevllm.admission.dataset import IndexedDataset, read_tasks
from fakevllm.errors import ConfigError


def test_rows_become_tasks_with_the_whole_row_as_metadata(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"question": "q1", "answer": "a1"}, {"question": "q2", "answer": "a2"}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    tasks = read_tasks(file, "question")
    assert [task.main_query for task in tasks] == ["q1", "q2"]
    assert tasks[1].metadata["answer"] == "a2"
    assert [task.task_id for task in read_tasks(file, "question")] == [t.task_id for t in tasks]


def test_a_row_is_found_by_its_id_until_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "q1"}\n\n{"question": "q2"}\n')
    first, second = (task.task_id for task in read_tasks(file, "question"))
    indexed = IndexedDataset(file, 1000)
    assert indexed.find_row(first) == {"question": "q1"}
    assert indexed.find_row(second) == {"question": "q2"}
    file_hash = first.rpartition("-")[0]
    for bad in ("", "x", f"{file_hash}-9", f"{file_hash}--1", f"{file_hash}-{'9' * 5000}"):
        assert indexed.find_row(bad) is None
    file.write_text('{"question": "q3"}\n')
    assert indexed.find_row(first) is None


def test_a_dataset_is_read_as_a_whole_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"q": "1"}\r\n{"q": "2"}\r{"q": "3"}\n\n{"q": "\xc3\xa9"}')
    tasks = read_tasks(file, "q")
    indexed = IndexedDataset(file, 1000)
    assert indexed.find_row(tasks[0].task_id) == {"q": "1"}
    monkeypatch.setattr(dataset, "hashlib", None)  # an error if a file is hashed
    assert [indexed.find_row(task.task_id) for task in tasks] == [task.metadata for task in tasks]
    assert [task.main_query for task in tasks] == ["1", "2", "3", "é"]


def test_the_rows_of_a_file_that_is_too_large_are_not_found(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "1"}\n')
    (task,) = read_tasks(file, "q")
    size = file.stat().st_size
    assert IndexedDataset(file, size).find_row(task.task_id) == {"q": "1"}
    assert IndexedDataset(file, size - 1).find_row(task.task_id) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1, is not JSON"),
        ('{"q": 1}', "no text field 'question' .its fields: q.: set --field"),
        ("[1]", "no text field 'question'"),
    ],
)
def test_the_error_for_a_bad_dataset_names_the_line_and_the_fix(
    tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_tasks(file, "question")


def test_a_missing_dataset_causes_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_tasks(tmp_path / "none.jsonl", "question")
