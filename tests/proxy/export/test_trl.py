"""TRL's trainers read exported files as they are. Needs TRL; .ci/real installs it."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import orjson
import pytest
from rich.console import Console

from fakevllm.export.command import ExportSettings, run_export
from fakevllm.export.row_formats import FORMATS
from fakevllm.ledger.records import FeedbackRecord, GroupRecord
from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.ledger_cases import group, sibling

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="install trl to run"),
]

Json = dict[str, Any]
SCRIPT = Path(__file__).with_name("trl_step.py")
TIMEOUT_S = 800
NUM_GROUPS = 8
ARGUMENTS: list[object] = [
    {"a": {"value": 1}, "rest": [1, "two"], "day": "2024-01-01"},
    {"a": "one", "day": "2024-01-02T10:00:00Z"},
    {},
    {"b": 2.5},
]
"""Arguments of the same tool, whose keys and types differ from row to row."""
DATE = "2024-01-01"
TOOL: Json = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """A ledger with plain requests, requests with tools, rewards, edits and thumbs. The requests
    with tools come last, so that the types of the columns must not depend on the first rows."""
    path = tmp_path / "ledger.sqlite"
    store = Ledger.open(path)
    for number in range(NUM_GROUPS):
        record = group(f"g{number}", [1.0, 0.0], received_at=1000.0 + number, step=number)
        num_plain = NUM_GROUPS - len(ARGUMENTS)
        has_tools = number >= num_plain
        store.record(
            with_tools(record, ARGUMENTS[number - num_plain]) if has_tools else plain(record)
        )
        feedback = FeedbackRecord(group_id=record.group_id, feedback_id="f", received_at=0.0)
        store.feedback.record(replace(feedback, thumbs="up" if number % 2 else "down"))
        if number % 3 == 0:
            store.feedback.record(replace(feedback, feedback_id="e", edited="The sum is 2."))
    store.close()
    return path


def plain(record: GroupRecord) -> GroupRecord:
    """Return a request whose history has contents that are only a date."""
    history = [{"role": "user", "content": DATE}, {"role": "assistant", "content": DATE}]
    body = {"messages": [*history, {"role": "user", "content": "What is 1 plus 1?"}]}
    return replace(record, request_json=orjson.dumps(body).decode())


def with_tools(record: GroupRecord, arguments: object) -> GroupRecord:
    function = {"name": "add", "arguments": json.dumps(arguments)}
    call = {"id": "c1", "type": "function", "function": function}
    body = {
        "messages": [
            {"role": "system", "content": "Use the tool."},
            {"role": "user", "content": [{"type": "text", "text": "What is 1 plus 1?"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [TOOL],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    message = {"role": "assistant", "content": None, "reasoning": "So?", "tool_calls": [call]}
    called = replace(
        sibling(0, 1.0, served=True), message_json=orjson.dumps(message).decode(), text=None
    )
    request = orjson.dumps(body).decode()
    return replace(record, request_json=request, siblings=[called, sibling(1, 0.0)])


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_trainers_run_a_step_on_exported_files(ledger: Path, tmp_path: Path, suffix: str) -> None:
    loaders = {name: tmp_path / f"{name}.py" for name in FORMATS}
    expected: dict[str, list[Json]] = {}
    for name, loader in loaders.items():
        rows = loader.with_suffix(".jsonl")
        run_export(ExportSettings(ledger, name, rows), Console(quiet=True))
        expected[name] = [orjson.loads(line) for line in rows.read_bytes().splitlines()]
        console = Console(record=True, width=1000)
        run_export(ExportSettings(ledger, name, loader.with_suffix(suffix)), console)
        printed = console.export_text().partition("Load the rows in Python:\n")[2]
        loader.write_text(dedent(printed))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *(f"{name}={file}" for name, file in loaders.items())],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines()]
    versions, *results = [json.loads(line) for line in lines if line]
    print(versions)
    by_format = {result["format"]: result for result in results}
    assert by_format.keys() == FORMATS.keys()
    assert {name: result["rows"] for name, result in by_format.items()} == expected
    assert all(len(result["rows"]) == NUM_GROUPS for result in results)
    del by_format["groups"]
    for name, result in by_format.items():
        assert math.isfinite(result["loss"]) and result["loss"] > 0, name
        assert "What is 1 plus 1?" in result["text"], name
    assert "answer 0" in by_format["messages"]["text"]
    assert "The sum is 2." in by_format["sft"]["text"]
