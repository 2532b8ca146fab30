"""Which run of a run directory a job continues, with the files of the runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.config.model import ConfigError
from fakevllm_server.episodes.job_identity import identity_of
from fakevllm_server.journal import row_changes
from fakevllm_server.journal.store import JOB, JOB_IDENTITY, Journal
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.run.model_identity import identify
from fakevllm_server.run.run_directory import RunDirectory
from tests.swarm_server.run.test_model_identity import make_model


def record(run_dir: Path, model: str) -> None:
    """Record that a run trains a model."""
    folder = RunFolder(run_dir)
    folder.record_model("embedded", identify(model))
    folder.close()


def test_models_of_the_same_size_with_other_weights_have_runs_of_their_own(tmp_path: Path) -> None:
    models = [identify(make_model(tmp_path / f"m{byte}", bytes([byte]))) for byte in range(3)]
    record(tmp_path / "run", str(models[0].model))
    runs = RunDirectory(tmp_path / "run")
    chosen = [runs.choose(TrainJob(), model).folder for model in models]
    assert chosen[0] == "." and len(set(chosen)) == 3
    record(tmp_path / "run" / chosen[1], str(models[1].model))
    assert [runs.choose(TrainJob(), model).folder for model in models] == chosen


def write_journal(folder: Path, **facts: str) -> None:
    folder.mkdir()
    journal = Journal(folder / "journal.sqlite")
    journal.put(*(row_changes.meta_set(key, value) for key, value in facts.items()))
    journal.close()


def test_without_run_json_the_run_at_the_top_has_the_name_of_its_run_and_not_of_its_last_job(
    tmp_path: Path,
) -> None:
    job = TrainJob(lr=0.5)  # without a name, in the run `a`
    identity = identity_of(job, None, "a").to_json()
    write_journal(tmp_path / "run", **{JOB: job.as_yaml(), JOB_IDENTITY: identity})
    runs = RunDirectory(tmp_path / "run")
    for name, folder in (("a", "."), (None, "."), ("b", "runs/b")):
        assert runs.choose(TrainJob(experiment_name=name), identify(None)).folder == folder


@pytest.mark.parametrize("key", [JOB, JOB_IDENTITY])
def test_a_journal_with_a_damaged_job_is_named(tmp_path: Path, key: str) -> None:
    write_journal(tmp_path / "run", **{key: "["})
    with pytest.raises(ConfigError, match=r"journal\.sqlite is damaged"):
        RunDirectory(tmp_path / "run").choose(TrainJob(), identify(None))
