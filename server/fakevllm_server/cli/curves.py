"""`fakevllm-server curves`: write a run's TensorBoard curves from its journal (a SQLite file)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm_server.cli.exit_codes import run_server_command


def curves(
    run_dir: Annotated[
        Path, typer.Option(readable=False, help="Run directory of the server.")
    ] = Path("runs/default"),
) -> None:
    """Write all TensorBoard curves of a run again. Stop the run's server first.

    The curves are read from the run's journal. A running server writes the curves
    itself if the package tensorboard is installed. Tables of samples are deleted, and
    not written again.
    """

    def run() -> None:
        import time

        from fakevllm_runtime.errors import ConfigError
        from fakevllm_server.cli.run_archive import RunArchive
        from fakevllm_server.curves.event_files import FOLDER, EventFiles
        from fakevllm_server.curves.run_follower import Curves
        from fakevllm_server.run.folder import RunFolder, RunInUse

        RunArchive(run_dir)  # raises ConfigError if the folder has no run
        folder = run_dir / FOLDER
        try:
            lock = RunFolder(run_dir)
        except RunInUse:
            raise ConfigError(_in_use_message(run_dir, folder)) from None
        try:
            run_curves = Curves(run_dir, EventFiles(folder))
            run_curves.clear()
            num_points = run_curves.catch_up(time.time(), is_last=True)
            run_curves.close()
        finally:
            lock.close()
        print(f"{num_points} points written; show them with `tensorboard --logdir {folder}`")

    run_server_command(run)


def _in_use_message(run_dir: Path, curves_dir: Path) -> str:
    """Return an error message that says why the curves of the run in `run_dir` cannot be written
    now: a running server has locked this folder. The server may train the run in `run_dir` itself,
    or a run in a folder below `run_dir`. The two cases have different messages."""
    from fakevllm_server.run.run_choice import TOP
    from fakevllm_server.run.run_directory import RunDirectory

    current = RunDirectory(run_dir).current
    if current != TOP:
        return (
            f"A server uses {run_dir}, and writes the curves of its current run, "
            f"{run_dir / current}: to write those of the run at the top, stop the server first."
        )
    return (
        f"A server or another command uses {run_dir}, and a running server writes the curves "
        "itself if the package `tensorboard` is installed where it runs: show them with "
        f"`tensorboard --logdir {curves_dir}`. To write all of them again, stop the server first."
    )
