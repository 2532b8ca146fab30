"""`fakevllm export` writes a file, counts what it left out, and names mistakes."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner

from fakevllm.admission.dataset import read_tasks
from fakevllm.admission.held_out import HeldOutRows
from fakevllm.cli.main import app
from fakevllm.errors import LedgerError, UserError
from fakevllm.export.command import ExportSettings, run_export
from fakevllm.export.row_formats import FORMATS
from fakevllm.ledger.records import FeedbackRecord, GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.new_file import new_file
from fakevllm_adapters.protocol.swarm import Task
from tests.proxy.ledger.ledger_cases import group, make_older

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


def documented_condition() -> str:
    """Return the condition of docs/export.md that selects the last turns."""
    page = (Path(__file__).parents[3] / "docs" / "export.md").read_text()
    (line,) = (one for one in page.splitlines() if one.startswith("    --where ") and "side" in one)
    return shlex.split(line)[1]


def test_the_documented_condition_selects_the_last_answered_turns(settings: ExportSettings) -> None:
    store = Ledger.open(settings.ledger)
    for record in (
        replace(group("g4", received_at=1004.0), parent_id="g3"),
        replace(group("title"), parent_id="g2", kind="side"),
        replace(group("failed", state="failed", served=9), parent_id="g1"),
        replace(group("eval"), parent_id="g0", kind="eval"),
    ):
        store.record(replace(record, request_json=CHAT))
    store.close()
    rows, _ = export(replace(settings, format_name="messages", where=documented_condition()))
    assert [row["group_id"] for row in rows] == ["g0", "g1", "g2", "g4"]


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
    assert "2 groups cannot be read and are not exported:\n  g1: JSONDecodeError" in output


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_that_cannot_be_encoded_are_skipped_and_listed(
    settings: ExportSettings, suffix: str
) -> None:
    deep = '{"a":' * 300 + "1" + "}" * 300
    tools = f'[{{"type":"function","function":{{"name":"f","parameters":{deep}}}}}]'
    with sqlite3.connect(settings.ledger) as db:
        body = f'{CHAT[:-1]},"tools":{tools}}}'
        db.execute("UPDATE group_rows SET request_json = ? WHERE group_id = 'g1'", (body,))
        db.execute("UPDATE group_rows SET session_id = X'FF' WHERE group_id = 'g2'")
    db.close()
    settings = replace(settings, target=settings.target.with_suffix(suffix))
    console = Console(record=True, width=120)
    run_export(settings, console)
    output = console.export_text()
    assert "3 rows as sft" in output
    assert "2 groups cannot be read and are not exported:" in output
    assert "  g1: TypeError: Recursion limit reached" in output
    assert "  g2: TypeError: session_id is bytes" in output


def test_tool_calls_without_a_form_for_templates_are_counted(settings: ExportSettings) -> None:
    call = '{"type":"custom","custom":{"name":"run","input":"ls"}}'
    with sqlite3.connect(settings.ledger) as db:
        for group_id, one in (("g1", call), ("g2", '{"type":"function"}')):
            calling = f'{{"role":"assistant","tool_calls":[{one}]}}'
            body = f'{{"messages":[{calling},{{"role":"user"}}]}}'
            db.execute(
                "UPDATE group_rows SET request_json = ? WHERE group_id = ?", (body, group_id)
            )
    db.close()
    rows, output = export(settings)
    assert [row["group_id"] for row in rows] == ["g0", "g3", "g4"]
    assert "1 custom_tool" in output and "1 broken_tool_call" in output
    assert "cannot be read" not in output


def test_requests_of_several_models_are_named(settings: ExportSettings) -> None:
    assert "models" not in export(settings)[1]
    store = Ledger.open(settings.ledger)
    store.record(replace(group("other"), model="large", request_json=CHAT))
    store.close()
    _, output = export(settings)
    assert "The requests name 2 models: m (5), large (1). --where \"model = 'NAME'\"" in output


HELD_OUT_TEXT = "What is the capital of Peru?"
HELD_OUT = HeldOutRows([Task(task_id="1", main_query=HELD_OUT_TEXT)])


def chat(*texts: str) -> str:
    """Return a request with user messages, and an answer between any two of them."""
    users = [{"role": "user", "content": text} for text in texts]
    reply = {"role": "assistant", "content": "Yes."}
    messages = [one for user in users for one in (user, reply)][:-1]
    return orjson.dumps({"messages": messages}).decode()


QUOTING = chat(f"Please: {HELD_OUT_TEXT.upper()} Thanks")
HELD_OUT_GROUPS = [
    *(
        replace(group("held"), request_json=QUOTING, reason=reason, state="served")
        for reason in ("paused", "skip_rule", "side_call", "fallback", "other_arm", None)
    ),
    replace(group("held"), request_json=CHAT, question=HELD_OUT_TEXT),
    replace(group("held"), request_json=chat("Hi", HELD_OUT_TEXT, "Why?")),
    replace(group("held", task_id="row-1"), request_json=CHAT),
    *(
        replace(
            group("held"),
            request_json=CHAT.replace("[", f'[{{"role":"{role}","content":"{HELD_OUT_TEXT}"}},', 1),
        )
        for role in ("system", "developer", "tool")
    ),
    replace(group("held"), request_json=f'{{"messages":"{HELD_OUT_TEXT}"}}', route="/v1/responses"),
    replace(
        group("held"),
        request_json=f'{{"previous_response_id":"gone","input":[{{"x":["{HELD_OUT_TEXT}"]}}]}}',
        route="/v1/responses",
    ),
    replace(group("held"), request_json=CHAT, reason="held_out: by the texts"),
]


@pytest.mark.parametrize("format_name", list(FORMATS))
@pytest.mark.parametrize("record", HELD_OUT_GROUPS, ids=str)
def test_held_out_rows_are_never_exported_whatever_their_reason(
    settings: ExportSettings, format_name: str, record: GroupRecord
) -> None:
    store = Ledger.open(settings.ledger)
    store.record(record)
    for group_id in ("g1", "held"):
        feedback = FeedbackRecord(group_id=group_id, feedback_id="f", received_at=0.0)
        store.feedback.record(replace(feedback, thumbs="up", edited="2"))
    store.close()
    tasks = {"row-1": Task(task_id="row-1", main_query=f"In one word: {HELD_OUT_TEXT}")}
    held_out = replace(settings, format_name=format_name, held_out=HELD_OUT, tasks=tasks)
    rows, output = export(held_out)
    assert "held" not in [row["group_id"] for row in rows]
    assert "g1" in [row["group_id"] for row in rows]
    assert "2 held_out" in output
    assert "release.eval_dataset" not in output


@pytest.mark.parametrize("field", ["edited", "comment"])
def test_feedback_that_quotes_a_held_out_row_keeps_its_group_out(
    settings: ExportSettings, field: str
) -> None:
    store = Ledger.open(settings.ledger)
    feedback = FeedbackRecord(group_id="g1", feedback_id="f", received_at=0.0)
    store.feedback.record(replace(feedback, **{field: f"Rather: {HELD_OUT_TEXT}"}))
    store.close()
    rows, _ = export(replace(settings, format_name="groups", held_out=HELD_OUT))
    ids = [row["group_id"] for row in rows]
    assert "g0" in ids and "g1" not in ids


def test_unknown_held_out_rows_are_noted_if_the_ledger_has_signs_of_them(
    settings: ExportSettings,
) -> None:
    note = "release.eval_dataset is not set, so requests with held-out rows may be in the file"
    for group_id in ("held_out", "evaluated"):  # either is a sign
        assert note in export(replace(settings, where="step < 5"))[1]
        with sqlite3.connect(settings.ledger) as db:
            db.execute("DELETE FROM group_rows WHERE group_id = ?", (group_id,))
        db.close()
    assert note not in export(settings)[1]


def test_the_configuration_in_the_run_folder_is_used(
    settings: ExportSettings, tmp_path: Path
) -> None:
    store = Ledger.open(settings.ledger)
    store.record(replace(group("held"), request_json=QUOTING))
    store.close()
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_bytes(orjson.dumps({"question": HELD_OUT_TEXT}))
    (tmp_path / "fakevllm.toml").write_text(f'[release]\neval_dataset = "{held_out}"\n')
    arguments = ["export", "--as", "sft", "--run-dir", str(tmp_path), "--to", str(settings.target)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = settings.target.read_bytes().splitlines()
    assert "held" not in [orjson.loads(line)["group_id"] for line in lines]
    assert "2 held_out" in result.output


def test_feedback_that_was_held_out_keeps_its_group_out(settings: ExportSettings) -> None:
    store = Ledger.open(settings.ledger)
    feedback = FeedbackRecord(group_id="g1", feedback_id="f", received_at=0.0, thumbs="up")
    store.feedback.record(replace(feedback, state="kept", reason="held_out"))
    store.close()
    rows, output = export(settings)
    assert "g1" not in [row["group_id"] for row in rows]
    assert "release.eval_dataset is not set, so requests with held-out rows" in output


def test_the_held_out_rows_and_the_dataset_of_the_configuration_are_used(
    settings: ExportSettings, tmp_path: Path
) -> None:
    rows = [{"question": f"In one word: {HELD_OUT_TEXT}", "answer": "Lima"}, {"question": "1+1?"}]
    dataset = tmp_path / "dataset.jsonl"
    dataset.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    store = Ledger.open(settings.ledger)
    for name, task in zip(("held", "known"), read_tasks(dataset, "question"), strict=True):
        store.record(replace(group(name, task_id=task.task_id), request_json=CHAT))
    store.close()
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_bytes(orjson.dumps({"question": HELD_OUT_TEXT}))
    config = tmp_path / "fakevllm.toml"
    config.write_text(f'[dataset]\nfile = "{dataset}"\n[release]\neval_dataset = "{held_out}"\n')
    arguments = ["export", "--as", "groups", "--ledger", str(settings.ledger)]
    arguments += ["--to", str(settings.target), "--config", str(config)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = settings.target.read_bytes().splitlines()
    exported = {row["group_id"]: row for row in map(orjson.loads, lines)}
    assert "held" not in exported
    assert exported["known"]["task"] == {"main_query": "1+1?", "metadata": rows[1]}
    held_out.write_text("")
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "has no rows" in result.output


def test_a_ledger_of_an_older_schema_is_exported_from_a_copy(
    settings: ExportSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    make_older(settings.ledger)
    before = settings.ledger.read_bytes()
    assert len(export(settings)[0]) == NUM_GROUPS
    assert f"{settings.ledger} has the schema of an older version" in capsys.readouterr().err
    assert settings.ledger.read_bytes() == before


CHANGES = [
    "INSERT INTO feedback (group_id, feedback_id, received_at, kind, edited, state) "
    "VALUES ('g1', 'new', 5.0, 'feedback', '7', 'kept')",
    "UPDATE feedback SET reason = 'taken_back'",
    "UPDATE group_rows SET reason = 'held_out' WHERE group_id = 'g1'",
    "UPDATE sibling_rows SET reward = 5.0 WHERE group_id = 'g1' AND reward = 0.0",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_ledger_of_an_older_schema_is_copied_again(
    settings: ExportSettings, change: str
) -> None:
    store = Ledger.open(settings.ledger)
    store.feedback.record(
        FeedbackRecord(group_id="g0", feedback_id="f", received_at=1.0, edited="6")
    )
    store.close()
    make_older(settings.ledger)
    before, _ = export(settings)
    assert export(settings)[0] == before
    with closing(sqlite3.connect(settings.ledger)) as db, db:
        db.execute(change)
    assert export(settings)[0] != before


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
    assert done.stderr.count("\n") == 1
    assert f"rows{suffix} was not written (File too large): free some space" in done.stderr
    assert not list(folder.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_file(tmp_path: Path, number: signal.Signals) -> None:
    code = (
        "import pathlib, sys, time; from fakevllm.runtime.new_file import new_file\n"
        "with new_file(pathlib.Path(sys.argv[1])) as file:\n"
        "    file.write(b'private'); file.flush(); time.sleep(60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "rows.jsonl")],
        # Under nohup, the tests ignore SIGHUP, and so would the process.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert process.wait(60) == 128 + number
    assert not list(tmp_path.iterdir())


def test_errors_of_other_files_are_not_blamed_on_the_target(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), new_file(tmp_path / "rows.jsonl"):
        (tmp_path / "missing").read_text()
    assert not list(tmp_path.iterdir())
