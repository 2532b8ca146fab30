"""`fakevllm-server curves`: write a run's TensorBoard curves from its journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm_server.cli.exit_codes import run_server_command


def curves(
    run_dir: Annotated[Path, typer.Option(help="Run directory of the server.")] = Path(
        "runs/default"
    ),
) -> None:
    """Write all TensorBoard curves of a run again. The run's server must be stopped.

    A running server writes the curves itself.
    """

    def run() -> None:
        import time

        from fakevllm_server.cli.run_archive import RunArchive
        from fakevllm_server.config.model import ConfigError
        from fakevllm_server.curves.run_follower import FOLDER, Curves
        from fakevllm_server.run.folder import RunFolder, RunInUse

        RunArchive(run_dir)  # raises ConfigError if the folder has no run
        folder = run_dir / FOLDER
        try:
            lock = RunFolder(run_dir)
        except RunInUse:
            raise ConfigError(
                f"The server of {run_dir} is running and writes the curves itself: show them with "
                f"`tensorboard --logdir {folder}`. To write all of them again, stop the server "
                "first."
            ) from None
        try:
            run_curves = Curves(run_dir)
            run_curves.clear()
            num_points = run_curves.catch_up(time.time(), is_last=True)
            run_curves.close()
        finally:
            lock.close()
        print(f"{num_points} points written; show them with `tensorboard --logdir {folder}`")

    run_server_command(run)
