"""`fakevllm-server curves`: a run's curves for TensorBoard, made of its journal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm_server.cli.exits import run_server_command


def curves(
    run_dir: Annotated[Path, typer.Option(help="The server's.")] = Path("runs/default"),
) -> None:
    """Write a run's curves for TensorBoard anew, all of them. Not while its server runs, which
    writes them itself."""

    def run() -> None:
        import time

        from fakevllm_server.cli.run_archive import RunArchive
        from fakevllm_server.curves.follower import FOLDER, Curves
        from fakevllm_server.run.folder import RunFolder

        RunArchive(run_dir)  # that there is one
        lock = RunFolder(run_dir)
        try:
            made = Curves(run_dir)
            made.clear()
            num = made.catch_up(time.time(), is_last=True)
            made.close()
        finally:
            lock.close()
        folder = run_dir / FOLDER
        print(f"{num} points written: tensorboard --logdir {folder}")

    run_server_command(run)
