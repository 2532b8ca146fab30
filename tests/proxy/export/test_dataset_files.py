"""A dataset file appears when it is complete, and both types of files have the same rows."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from fakevllm.errors import ConfigError, UserError
from fakevllm.export import dataset_files
from fakevllm.export.columns import Columns, ColumnType
from fakevllm.export.dataset_files import dataset_file

COLUMNS: Columns = {
    "messages": ColumnType.OBJECTS,
    "kwargs": ColumnType.OBJECT,
    "text": ColumnType.TEXT,
    "turn": ColumnType.INTEGER,
    "reward": ColumnType.NUMBER,
    "label": ColumnType.FLAG,
}
ROWS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user"}, {"role": "tool", "deep": {"a": [1, None]}}],
        "kwargs": {},
        "text": "ä “ \n",
        "turn": 1,
        "reward": 0.1,
        "label": True,
    },
    dict.fromkeys(COLUMNS),
    {
        "messages": [],
        "kwargs": {"enable_thinking": False},
        "text": "",
        "turn": 2,
        "reward": None,
        "label": False,
    },
]


def write(target: Path, rows: list[dict[str, Any]] = ROWS) -> None:
    with dataset_file(target, COLUMNS) as file:
        for row in rows:
            file.write(file.encode(row))


def read_parquet(file: Path) -> list[dict[str, Any]]:
    parquet: Any = importlib.import_module("pyarrow.parquet")

    def parsed(row: dict[str, Any]) -> dict[str, Any]:
        lists, objects = row["messages"], row["kwargs"]
        return row | {
            "messages": None if lists is None else [orjson.loads(each) for each in lists],
            "kwargs": None if objects is None else orjson.loads(objects),
        }

    return [parsed(row) for row in parquet.read_table(file).to_pylist()]


@pytest.mark.parametrize("group_rows", [1, 2, 100])
def test_rows_are_read_back_as_they_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group_rows: int
) -> None:
    monkeypatch.setattr(dataset_files, "MAX_ROW_GROUP_ROWS", group_rows)
    write(tmp_path / "rows.jsonl")
    lines = (tmp_path / "rows.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line) for line in lines] == ROWS
    write(tmp_path / "rows.parquet")
    assert read_parquet(tmp_path / "rows.parquet") == ROWS


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_row_with_a_value_of_another_type_is_refused_alone(tmp_path: Path, name: str) -> None:
    wrong: dict[str, Any] = {
        **{"messages": "[]", "kwargs": [], "text": b"raw", "turn": "first", "reward": "high"},
        "label": 1,
    }
    with dataset_file(tmp_path / name, COLUMNS) as file:
        for column, value in wrong.items():
            with pytest.raises(TypeError, match=f"^{column} is .*, and not "):
                file.encode(ROWS[0] | {column: value})
        file.write(file.encode(ROWS[0] | {"reward": 1}))
    if name.endswith("parquet"):
        assert read_parquet(tmp_path / name)[0]["reward"] == 1.0
    else:
        assert b'"reward":1.0' in (tmp_path / name).read_bytes()


def test_a_row_group_is_written_when_its_rows_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_files, "ROW_GROUP_BYTES", 100)
    write(tmp_path / "rows.parquet", [ROWS[0] | {"text": "x" * 60} for _ in range(4)])
    parquet: Any = importlib.import_module("pyarrow.parquet")
    assert parquet.ParquetFile(tmp_path / "rows.parquet").num_row_groups == 4


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_an_error_leaves_the_older_file_and_no_other(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("older")
    with (
        pytest.raises(RuntimeError, match="stop"),
        dataset_file(tmp_path / name, COLUMNS) as file,
    ):
        file.write(file.encode(ROWS[0]))
        raise RuntimeError("stop")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [(name, "older")]


def test_a_new_file_replaces_an_older_one_and_is_private(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("older")
    write(tmp_path / "rows.jsonl", ROWS[1:2])
    assert (tmp_path / "rows.jsonl").read_text().startswith('{"messages":null')
    assert (tmp_path / "rows.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rows.csv", r"rows.csv has an unknown type: end its name with .jsonl or .parquet"),
        ("missing/rows.jsonl", r"The folder of .*missing/rows.jsonl does not exist: create it"),
        ("folder.jsonl", r"folder.jsonl cannot be written \(Is a directory\): name another file"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / name)
    assert [one.name for one in tmp_path.iterdir()] == ["folder.jsonl"]


def test_without_pyarrow_one_line_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs the package pyarrow .* -e '\.\[parquet\]'"):
        write(tmp_path / "rows.parquet")
    assert not list(tmp_path.iterdir())
