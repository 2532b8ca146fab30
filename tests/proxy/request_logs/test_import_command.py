"""`fakevllm import` writes a dataset that `fakevllm replay` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from fakevllm.admission.dataset import read_tasks
from fakevllm.errors import UserError
from fakevllm.request_logs.command import run_import

GOOD = {"messages": [{"role": "user", "content": "2+2?"}]}


def log(folder: Path, *lines: object) -> Path:
    file = folder / "log.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_the_dataset_has_the_requests_and_the_output_counts_the_rest(tmp_path: Path) -> None:
    file = log(tmp_path, GOOD, {"id": 1}, {"object": "list", "data": [GOOD, GOOD]})
    file.write_text(file.read_text() + "\n{broken\n")
    console = Console(record=True, width=120)
    run_import(file, tmp_path / "rows.jsonl", console)
    tasks = read_tasks(tmp_path / "rows.jsonl", "question")
    assert [task.main_query for task in tasks] == ["2+2?"] * 3
    assert tasks[0].metadata["messages"] == GOOD["messages"]
    output = console.export_text()
    assert "rows.jsonl: 3 rows from " in output
    assert "1 skipped: 1 no_request" in output
    assert "1 line is not JSON: 5" in output
    assert "fakevllm replay --dataset" in output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty, so no file was written"),
        ('{\n"messages": []\n}\n', "line 1 is not JSON. The log must be JSON Lines"),
        ('{"messages": []}\n', "no request that can be replayed, .*: 1 no_messages"),
    ],
)
def test_a_log_without_requests_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        run_import(file, tmp_path / "rows.jsonl")
    assert [one.name for one in tmp_path.iterdir()] == ["log.jsonl"]


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
def test_the_log_itself_is_not_overwritten(tmp_path: Path, link: str | None) -> None:
    file = log(tmp_path, GOOD)
    target = file
    if link is not None:
        target = tmp_path / "rows.jsonl"
        getattr(target, link)(file)
    before = file.read_bytes()
    with pytest.raises(UserError, match=r"--to .*jsonl is the log itself: name another file"):
        run_import(file, target)
    assert file.read_bytes() == target.read_bytes() == before


def test_an_entry_that_cannot_be_encoded_is_counted(tmp_path: Path) -> None:
    deep: object = 1
    for _ in range(300):
        deep = [deep]
    file = log(tmp_path, GOOD | {"tools": [{"type": "function", "deep": deep}]}, GOOD)
    console = Console(record=True, width=120)
    run_import(file, tmp_path / "rows.jsonl", console)
    assert "1 skipped: 1 nested_too_deep" in console.export_text()
    assert len(read_tasks(tmp_path / "rows.jsonl", "question")) == 1


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"The log .*missing cannot be read: No such file"):
        run_import(tmp_path / "missing", tmp_path / "rows.jsonl")
    with pytest.raises(UserError, match=r"rows.json has an unknown type: end its name with .jsonl"):
        run_import(log(tmp_path, GOOD), tmp_path / "rows.json")


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    file = log(tmp_path, GOOD)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    run_import(file, tmp_path / "rows.jsonl", Console(quiet=True))
    assert len(read_tasks(tmp_path / "rows.jsonl", "question")) == 1
