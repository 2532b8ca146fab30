"""`fakevllm export` writes a file, counts what it left out, and names mistakes."""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from fakevllm.errors import LedgerError, UserError
from fakevllm.export.command import ExportSettings, run_export
from fakevllm.ledger.migrations import MIGRATIONS
from fakevllm.ledger.records import FeedbackRecord
from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.ledger_cases import group

NUM_GROUPS = 5
CHAT = '{"messages":[{"role":"user","content":"1+1?"}]}'


@pytest.fixture
def settings(tmp_path: Path) -> ExportSettings:
    path = tmp_path / "ledger.sqlite"
    store = Ledger.open(path)
    for number in range(NUM_GROUPS):
        record = group(f"g{number}", [1.0, 0.0], received_at=1000.0 + number, step=number)
        store.record(replace(record, request_json=CHAT))
    store.record(replace(group("evaluated"), kind="eval", request_json=CHAT))
    store.record(replace(group("held_out"), reason="held_out", request_json=CHAT))
    prompt = '{"prompt":"Once"}'
    store.record(replace(group("text"), route="/v1/completions", request_json=prompt))
    store.close()
    return ExportSettings(path, "sft", tmp_path / "rows.jsonl")


def export(settings: ExportSettings) -> tuple[list[dict[str, Any]], str]:
    """Run the command. Return the rows of its file, and its output."""
    console = Console(record=True, width=120)
    run_export(settings, console)
    lines = settings.target.read_bytes().splitlines()
    return [orjson.loads(line) for line in lines], console.export_text()


def test_the_file_has_the_groups_in_their_order_and_the_output_counts_the_others(
    settings: ExportSettings,
) -> None:
    rows, output = export(settings)
    assert [row["group_id"] for row in rows] == [f"g{number}" for number in range(NUM_GROUPS)]
    assert "rows.jsonl: 5 rows as sft, from 7 groups" in output
    assert "2 groups skipped: " in output
    assert "1 held_out" in output and "1 no_messages" in output
    assert 'load_dataset("json", data_files="' in output


def test_a_condition_and_a_number_select_groups(settings: ExportSettings) -> None:
    rows, _ = export(replace(settings, where="step < 4", last=2))
    assert [row["group_id"] for row in rows] == ["g2", "g3"]


def test_only_the_last_turns_of_conversations_can_be_selected(settings: ExportSettings) -> None:
    store = Ledger.open(settings.ledger)
    store.record(replace(group("g4", received_at=1004.0), request_json=CHAT, parent_id="g3"))
    store.close()
    condition = (
        "group_id NOT IN (SELECT parent_id FROM group_rows WHERE parent_id IS NOT NULL) "
        "AND received_at > 1000"
    )
    rows, _ = export(replace(settings, where=condition))
    assert [row["group_id"] for row in rows] == ["g1", "g2", "g4"]


def test_feedback_is_read_from_the_ledger(settings: ExportSettings) -> None:
    store = Ledger.open(settings.ledger)
    store.feedback.record(
        FeedbackRecord(group_id="g1", feedback_id="f", received_at=0.0, thumbs="down", edited="2")
    )
    store.close()
    ((labelled,), _) = export(replace(settings, format_name="kto"))
    assert (labelled["group_id"], labelled["label"]) == ("g1", False)
    pairs, _ = export(replace(settings, format_name="preference"))
    assert [pair["source"] for pair in pairs] == ["rewards", "edit", *["rewards"] * 3]
    assert pairs[1]["chosen"] == [{"role": "assistant", "content": "2"}]


def test_groups_with_broken_rows_are_skipped_and_listed(settings: ExportSettings) -> None:
    with sqlite3.connect(settings.ledger) as db:
        db.execute("UPDATE group_rows SET request_json = '{' WHERE group_id = 'g1'")
        db.execute("UPDATE sibling_rows SET message_json = '[]' WHERE group_id = 'g2'")
    db.close()
    rows, output = export(settings)
    assert [row["group_id"] for row in rows] == ["g0", "g3", "g4"]
    assert "2 groups cannot be read, and not exported:\n  g1: JSONDecodeError" in output


def test_a_ledger_of_an_older_schema_is_exported_from_a_copy(settings: ExportSettings) -> None:
    with sqlite3.connect(settings.ledger) as db:
        db.execute("DROP TABLE rescored")
        db.execute("DELETE FROM migrations WHERE name = ?", (MIGRATIONS[-1].__name__,))
    db.close()
    before = settings.ledger.read_bytes()
    assert len(export(settings)[0]) == NUM_GROUPS
    assert settings.ledger.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ledger": Path("missing.sqlite")}, "There is no ledger missing.sqlite: name another"),
        ({"where": "step >"}, "--where 'step >' is not an SQL expression"),
        ({"where": "step = 99"}, "No group in .* meets the condition, so no file was written"),
        ({"format_name": "kto"}, "No row for --as kto, so no .* 7 groups: 6 no_feedback, 1 held"),
        ({"min_difference": 0.5}, "--min-difference works only with --as preference"),
        ({"target": Path("rows.txt")}, "--to rows.txt has an unknown type"),
    ],
)
def test_mistakes_are_named_and_no_file_is_written(
    settings: ExportSettings, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run_export(replace(settings, **changes))
    assert not settings.target.exists()
    assert not list(settings.target.parent.glob(".*"))


def test_a_file_that_is_no_ledger_is_named(settings: ExportSettings) -> None:
    text = settings.ledger.with_name("text")
    text.write_text("no database, but long enough to be read as one" * 100)
    with pytest.raises(LedgerError, match="text cannot be read or copied"):
        run_export(replace(settings, ledger=text))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_full_disk_leaves_no_file_and_one_line(
    settings: ExportSettings, suffix: str, tmp_path: Path
) -> None:
    store = Ledger.open(settings.ledger)
    for number in range(40):
        noise = "".join(f"{i * number:x}" for i in range(500))
        body = {"messages": [{"role": "user", "content": noise}]}
        store.record(replace(group(f"n{number}"), request_json=orjson.dumps(body).decode()))
    store.close()
    folder = tmp_path / "out"
    folder.mkdir()
    arguments = ["export", "--as", "sft", "--ledger", str(settings.ledger)]
    command = [sys.executable, "-m", "fakevllm", *arguments, "--to", str(folder / f"rows{suffix}")]
    # The limit also applies to the ledger's -shm file, which SQLite makes with 32 KiB.
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)),
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip().count("\n") == 0
    assert f"rows{suffix} was not written (File too large): free some space" in done.stderr
    assert not list(folder.iterdir())
