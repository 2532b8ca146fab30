"""The list of the runs below a run directory."""

from __future__ import annotations

from pathlib import Path

from fakevllm_server.journal.store import Journal
from fakevllm_server.run.run_list import list_runs


def make_run(folder: Path) -> Path:
    folder.mkdir(parents=True)
    Journal(folder / "journal.sqlite").close()
    return folder


def test_a_link_out_of_the_run_directory_is_no_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    make_run(run_dir / "runs/inside")
    (run_dir / "runs/link").symlink_to(make_run(tmp_path / "elsewhere"))
    assert [run.folder for run in list_runs(run_dir)] == [".", "runs/inside"]
