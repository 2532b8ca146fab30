"""`fakevllm retrain` reads groups from a ledger, and refuses those that must not be trained."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fakevllm.admission.held_out import HeldOutRows
from fakevllm.cli.main import app
from fakevllm.errors import UserError
from fakevllm.ledger.records import EVAL_KIND
from fakevllm.ledger.store import Ledger
from fakevllm.retraining.command import RetrainSettings, run_retrain
from fakevllm.retraining.group_reader import GroupReader
from fakevllm.retraining.source_run import RunModel, SourceRun, one_line
from fakevllm.runtime.local_engines import EngineChoice
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.types.calls import RecordedCall
from tests.proxy.ledger.ledger_cases import call, group

CHAT = '{"messages":[{"role":"user","content":"1+1?"}]}'


@pytest.fixture
def ledger_path(tmp_path: Path) -> Path:
    """A ledger with the groups g0 to g3, which have tokens."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger.open(path)
    for at in range(4):
        ledger.record(replace(group(f"g{at}", received_at=at), request_json=CHAT))
        ledger.settle(f"g{at}", "pooled", None, 1, [[call()], [call()]], "run")
    ledger.close()
    return path


def test_calls_that_may_have_been_restricted_are_not_trained(ledger_path: Path) -> None:
    with closing(sqlite3.connect(ledger_path)) as db, db:
        db.execute("UPDATE call_rows SET shaped = NULL WHERE sibling = 1")
    ledger = Ledger.open(ledger_path)
    read = GroupReader(ledger, "", None, HeldOutRows(), {}).read("g0")
    ledger.close()
    reasons = [RecordedCall.from_log(own[0]).untrainable or "" for own in read.calls]
    assert [one.partition(":")[0] for one in reasons] == ["", "unknown_token_sets"]


def retrain(folder: Path, config: str, monkeypatch: pytest.MonkeyPatch, *flags: str) -> str:
    """Run the command with the fake engine, and return its output."""
    monkeypatch.chdir(folder)
    Path("fakevllm.toml").write_text(config)
    Path("hooks").mkdir()
    command = ["retrain", "--hooks", "hooks", "--ledger", "ledger.sqlite", "--backend", "fake"]
    return CliRunner().invoke(app, [*command, *flags]).output


def test_a_ledger_with_evaluations_is_refused_if_the_held_out_rows_are_unknown(
    ledger_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger.open(ledger_path)
    ledger.record(replace(group("evaluated"), kind=EVAL_KIND, request_json=CHAT))
    ledger.close()
    output = retrain(ledger_path.parent, "[job]\nbatch_size = 2\n", monkeypatch)
    assert "release.eval_dataset is not set" in output


@pytest.mark.parametrize(("flags", "expected"), [((), 0.9), (("--min-ess", "0.2"), 0.2)])
def test_the_limit_is_that_of_the_job_unless_a_flag_names_another(
    ledger_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    flags: tuple[str, ...],
    expected: float,
) -> None:
    found: list[RetrainSettings] = []
    monkeypatch.setattr("fakevllm.retraining.command.run_retrain", found.append)
    retrain(ledger_path.parent, "[job]\nmin_logged_ess = 0.9\n", monkeypatch, *flags)
    assert [one.training_job.min_logged_ess for one in found] == [expected]


def test_flags_of_the_model_and_the_engines_reach_the_server(
    ledger_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[RetrainSettings] = []
    monkeypatch.setattr("fakevllm.retraining.command.run_retrain", found.append)
    flags = ("--allow-hub", "--engine-arg=--dtype float16", "--trainer-arg=--fsdp 2")
    retrain(ledger_path.parent, "", monkeypatch, *flags)
    assert {*flags} <= {*found[0].server_flags("org/name", Path("new"))}


def test_a_refused_export_names_its_cause_and_the_allowed_way(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        SourceRun(tmp_path / "none").export(3, tmp_path / "model", None)
    (line,) = str(caught.value).splitlines()
    assert "none" in line and not line.startswith("fakevllm-server: ")


def test_a_message_of_several_lines_keeps_its_cause() -> None:
    text = "fakevllm-server: It needs a GPU.\nverl's merger can export without one: `merge`.\n"
    assert one_line(text) == "It needs a GPU. verl's merger can export without one: `merge`."


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--run-dir", "fakevllm.toml"), "fakevllm.toml"),
        (("--json", "missing/figures.json"), "The folder of --json"),
    ],
)
def test_a_mistake_is_named_before_anything_is_scored(
    ledger_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], message: str
) -> None:
    output = retrain(ledger_path.parent, "[job]\nbatch_size = 2\n", monkeypatch, *flags)
    (line,) = output.splitlines()
    assert line.startswith("fakevllm: ") and message in line


def write_run(folder: Path, run_id: str, name: str | None, fingerprint: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run_id").write_text(run_id)
    model = {"backend": "embedded", "model": name, "fingerprint": fingerprint}
    (folder / "model.json").write_text(json.dumps(model))


def test_the_run_that_sampled_the_groups_is_found_below_the_run_directory(tmp_path: Path) -> None:
    write_run(tmp_path, "top", "one", "f1")
    write_run(tmp_path / "runs" / "b", "own", "two", "f2")
    assert SourceRun.find(tmp_path, ["own", "own", "top", None]).model == RunModel("two", "f2")
    assert SourceRun.find(tmp_path, ["unknown", None]).folder == tmp_path


@pytest.mark.parametrize(
    ("used", "remedy"), [("other", "with --model"), (None, "choose its engines with --backend")]
)
def test_another_model_is_refused_with_both_names(
    tmp_path: Path, used: str | None, remedy: str
) -> None:
    write_run(tmp_path, "run", "first", "f1")
    with pytest.raises(UserError) as caught:
        SourceRun(tmp_path).check_same_model(RunModel(used, used))
    for part in ("the model first (fingerprint f1)", used or "the fake engine", remedy):
        assert part in str(caught.value)


def test_all_epochs_together_must_fill_a_step(tmp_path: Path) -> None:
    settings = RetrainSettings(tmp_path, tmp_path, 1.0, TrainJob(batch_size=8), tmp_path, epochs=2)
    assert (settings.fill_a_step(3), settings.fill_a_step(4)) == (False, True)


def test_an_interrupted_command_leaves_no_folder_without_an_update(
    ledger_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(RetrainSettings, "server_flags", interrupt)
    job = TrainJob(batch_size=2)
    folder = ledger_path.parent / "new"
    fake = EngineChoice.resolve("fake")
    settings = RetrainSettings(
        ledger_path, ledger_path, 1.0, job, ledger_path.parent, folder, engines=fake
    )
    with pytest.raises(KeyboardInterrupt):
        run_retrain(settings)
    assert not folder.exists()
