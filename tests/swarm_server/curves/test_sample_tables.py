"""Tables of sampled answers, in TensorBoard's files and in wandb's offline files."""

from __future__ import annotations

import doctest
import html
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.swarm import LogEntry
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.config.sample_tables import SampleTableSettings
from fakevllm_server.curves import sample_tables
from fakevllm_server.curves.run_follower import Curves
from fakevllm_server.curves.sample_reader import SampleReader, SampleRules
from fakevllm_server.curves.sample_tables import (
    COLUMNS,
    COMPLETIONS,
    MAX_CHARS,
    SampleTable,
)
from fakevllm_server.curves.tracker_process import ProcessFollower
from fakevllm_server.curves.trackers import folders_with_tables
from fakevllm_server.journal import row_changes
from fakevllm_server.journal.forgotten_calls import calls_forgotten
from fakevllm_server.journal.store import JOB
from fakevllm_server.run.tokenizer_reader import load_vocabulary
from tests.e2e.processes import wait_until
from tests.swarm_server.curves.charted_run import TENSORBOARD, Run
from tests.swarm_server.curves.readings import Charts
from tests.swarm_server.curves.wandb_rows import WandbRows, is_same, needs_wandb

SECRET = "ann@example.org"
MISSING = "fakevllm/samples_missing"
SAMPLES = SampleTableSettings(num_groups=2, every=1)
NASTY = (
    "| a | b\n<script>x</script> [l](http://x) ![p](y) `c` *b* _i_ \\ &amp; #1 ~~s~~\u2028$x$"
    "\x07é漢"
)
"""An answer that would be more than a cell, if it were not escaped."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
async def run(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Run]:
    run = Run(tmp_path / "run", getattr(request, "param", SAMPLES.keep_calls_s))
    await run.process.boot_trainer()
    yield run
    run.curves.close()
    run.process.close()


def rules(
    settings: SampleTableSettings = SAMPLES, privacy: PrivacySettings | None = None
) -> SampleRules:
    return SampleRules(settings, privacy or PrivacySettings())


def write(run: Run, samples: SampleRules | None, *trackers: str) -> None:
    """Let a server's processes write the curves, and wait for their end."""
    assert run.process.journal.drain()
    for name in trackers:
        follower = ProcessFollower(run.folder, name, close_limit_s=120.0, samples=samples)
        follower.start()
        wait_until(lambda one=follower: one.pid is not None, 60)
        follower.close()


def catch_up(run: Run, samples: SampleRules) -> None:
    """Write the curves to TensorBoard's files, in this process."""
    assert run.process.journal.drain()
    run.curves.close()
    reader = SampleReader(run.folder, samples)
    run.curves = Curves(run.folder, TENSORBOARD.open(run.folder), reader)
    run.curves.catch_up(time.time())


def as_shown(rows: list[list[Any]]) -> list[list[str]]:
    """Return the rows of a table as TensorBoard shows them."""
    return [["" if cell is None else str(cell).strip() for cell in row] for row in rows]


def bytes_below(folder: Path) -> bytes:
    """Return all bytes of a folder's files, as they are and without the escapes of HTML."""
    raw = b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())
    return raw + html.unescape(raw.decode(errors="replace")).encode()


def texts_of(run: Run) -> bytes:
    return b"".join(bytes_below(run.folder / name) for name in ("tensorboard", "wandb"))


def test_the_docstring_examples_hold() -> None:
    assert doctest.testmod(sample_tables).failed == 0


@needs_wandb
async def test_tables_have_the_same_names_and_values_in_tensorboard_and_in_wandb(
    run: Run, tmp_path: Path
) -> None:
    await run.train_texts("a", "What is 1 + 1?", {"2": 1.0, "three": 0.0, " ": 0.25})
    await run.train_texts("b", "Say | or <b>", {"|": 0.5, "<b>": 0.0, "x": None}, reason="redacted")
    await run.train_texts("c", "x", {NASTY: 1.0, "y": 0.0})
    write(run, rules(), "tensorboard", "wandb")
    charts, rows = Charts(run.folder), WandbRows(run.folder)
    in_tensorboard, in_wandb = charts.tables(COMPLETIONS), rows.tables(COMPLETIONS)
    assert [step for step, _ in in_wandb] == [step for step, _ in in_tensorboard] == [1, 2, 3]
    assert in_wandb[0][1][0] == [*COLUMNS]
    assert [row[:5] for row in in_wandb[0][1][1:]] == [
        [1, 1, "What is 1 + 1?", "2", 1.0],
        [1, 1, "What is 1 + 1?", "three", 0.0],
        [1, 1, "What is 1 + 1?", " ", 0.25],
    ]
    advantages = [row[5] for row in in_wandb[0][1][1:]]
    assert advantages[0] > 0 > advantages[1] and sum(advantages) == pytest.approx(0)
    assert in_wandb[1][1][3] == [2, 1, "", "[redacted]", None, None]
    assert in_wandb[2][1][1][3] == NASTY
    for (_, one), (_, other) in zip(in_tensorboard[:2], in_wandb, strict=False):
        assert one == as_shown(other)
    shown = NASTY.replace("\u2028", "\n").replace("\x07", "\ufffd")
    assert in_tensorboard[2][1][1][3] == shown
    points = rows.points()
    assert points.keys() == charts.names
    for name in points.keys() - {"training/global_step"}:
        pairs = zip(points[name], charts.points(name), strict=True)
        assert all(x == y and is_same(v, w) for (x, v), (y, w) in pairs), name
    assert points[MISSING] == [(1, 0.0), (2, 0.0), (3, 0.0)]
    assert not (tmp_path / "home/.local").exists(), "wandb keeps no copies elsewhere"


@needs_wandb
async def test_by_default_the_trackers_get_no_text_and_no_table(run: Run) -> None:
    await run.train_texts("a", "a question", {"an answer": 1.0, "another": 0.0})
    assert not SampleTableSettings().is_due(10)
    for samples in (None, rules(SampleTableSettings())):
        write(run, samples, "tensorboard", "wandb")
    assert texts_of(run).count(b"critic/score/mean") >= 2
    for text in (b"a question", b"an answer", COMPLETIONS.encode(), MISSING.encode()):
        assert text not in texts_of(run)
    assert folders_with_tables(run.folder) == []


@needs_wandb
@pytest.mark.parametrize("setting", ["server", "job"])
async def test_a_secret_from_before_redaction_is_in_no_byte_of_the_trackers(
    run: Run, setting: str
) -> None:
    await run.train_texts("a", f"I am {SECRET}.", {f"Hi {SECRET}": 1.0, "continue": 0.0})
    privacy = PrivacySettings(redact=("email",))
    job = TrainJob(privacy=privacy if setting == "job" else None)
    run.process.journal.put(row_changes.meta_set(JOB, job.as_yaml()))
    write(run, rules(privacy=privacy if setting == "server" else None), "tensorboard", "wandb")
    tables = Charts(run.folder).tables(COMPLETIONS) + WandbRows(run.folder).tables(COMPLETIONS)
    assert len(tables) == 2
    for _, rows in tables:
        assert [row[2:4] for row in rows[1:]] == [
            ["I am [redacted: email].", "Hi [redacted: email]"],
            ["I am [redacted: email].", "continue"],
        ]
    assert SECRET.encode() not in texts_of(run)


async def test_a_secret_that_begins_in_the_prompt_or_at_a_cut_is_redacted_too(run: Run) -> None:
    half = "x" * (MAX_CHARS // 2 - 5)
    answer = f"{half} {SECRET} {half} {half}"
    await run.train_texts("a", "My address is ann@exam", {"ple.org, yes": 1.0, answer: 0.0})
    catch_up(run, rules(privacy=PrivacySettings(redact=("email",))))
    rows = run.charts.tables(COMPLETIONS)[0][1]
    assert rows[1][3] == ", yes" and "ple.org" not in str(rows)
    assert "ann@" not in rows[2][3] and "characters…]" in rows[2][3]
    assert len(rows[2][3]) < MAX_CHARS + 40


async def test_a_table_has_the_first_groups_of_each_nth_step(run: Run) -> None:
    for name in "abcd":
        await run.train_texts(name, f"question {name}", {"1": 1.0, "0": 0.0})
    catch_up(run, rules(SampleTableSettings(num_groups=1, every=2)))
    tables = run.charts.tables(COMPLETIONS)
    assert [(step, rows[1][2], len(rows)) for step, rows in tables] == [
        (2, "question b", 3),
        (4, "question d", 3),
    ]
    assert run.charts.steps(MISSING) == [2, 4]


@pytest.mark.parametrize(
    ("run", "num_missing"), [(SAMPLES.keep_calls_s, 0.0), (0.0, 1.0)], indirect=["run"]
)
async def test_with_tables_the_calls_of_a_step_are_kept_until_the_trackers_have_read_them(
    run: Run, num_missing: float
) -> None:
    for name in "ab":  # a checkpoint is saved at 2
        await run.train_texts(name, "question", {"1": 1.0, "0": 0.0})
    await run.process.checkpointer.prune()
    catch_up(run, rules())
    assert run.charts.points(MISSING) == [(1, num_missing), (2, num_missing)]


async def test_a_folder_counts_as_one_with_tables_before_the_texts_are_read(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[str] = []
    read = SampleReader.table

    def table(reader: SampleReader, entry: LogEntry) -> SampleTable | None:
        folders.extend(folders_with_tables(run.folder))
        return read(reader, entry)

    monkeypatch.setattr(SampleReader, "table", table)
    await run.train_texts("a", "question", {"1": 1.0, "0": 0.0})
    catch_up(run, rules())
    assert folders == [str(run.folder.resolve() / "tensorboard")]


async def test_forgotten_groups_are_missing_and_counted_when_tables_are_written_again(
    run: Run,
) -> None:
    await run.train_texts("a", f"I am {SECRET}", {"1": 1.0, "0": 0.0})
    await run.train_texts("b", "question", {"1": 1.0, "0": 0.0})
    catch_up(run, rules())
    assert folders_with_tables(run.folder) == [str(run.folder.resolve() / "tensorboard")]
    assert SECRET.encode() in bytes_below(run.folder / "tensorboard")
    run.process.journal.put(calls_forgotten(["a"]))
    run.curves.clear()
    assert folders_with_tables(run.folder) == []
    catch_up(run, rules())
    assert [step for step, _ in run.charts.tables(COMPLETIONS)] == [2]
    assert run.charts.points(MISSING) == [(1, 1.0), (2, 0.0)]
    assert SECRET.encode() not in bytes_below(run.folder / "tensorboard")


async def test_texts_that_cannot_be_decoded_cost_one_line_and_no_curve(
    run: Run, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name in "abc":
        await run.train_texts(name, "question", {"1": 1.0, "0": 0.0})
    model = {"backend": "embedded", "model": str(tmp_path / "moved"), "fingerprint": "x"}
    (run.folder / "model.json").write_text(json.dumps(model))
    catch_up(run, rules())
    (record,) = caplog.records
    assert "Tables of samples cannot be written: the tokenizer of" in record.getMessage()
    assert "tokenizer.json" in record.getMessage()
    assert run.charts.steps() == [1, 2, 3]
    assert run.charts.points(MISSING) == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert run.charts.tables(COMPLETIONS) == []


async def test_a_models_own_tokenizer_decodes_the_tokens(run: Run) -> None:
    decode = load_vocabulary(str(DEMO_MODEL_DIR)).decode
    assert decode is not None
    await run.train("a")
    model = {"backend": "embedded", "model": str(DEMO_MODEL_DIR), "fingerprint": "x"}
    (run.folder / "model.json").write_text(json.dumps(model))
    catch_up(run, rules())
    rows = run.charts.tables(COMPLETIONS)[0][1]
    assert rows[1][2:4] == [decode([1, 2, 3]).strip(), decode([5, 6]).strip()]
    assert rows[1][2] and rows[1][3]
