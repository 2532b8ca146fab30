"""`fakevllm-server checkpoints`: list, verify and export a run's checkpoints, or go back to one.

Slow imports are inside the commands' functions, so that `--help` is fast.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fakevllm_server.cli.exit_codes import run_server_command

if TYPE_CHECKING:
    from rich.table import Table

    from fakevllm_server.cli.run_archive import (
        CheckpointInfo,
        CheckpointRestore,
        OnRead,
        RunArchive,
        TrainedModel,
    )

app = typer.Typer(
    name="checkpoints",
    help="List, verify and export a run's checkpoints, or go back to one.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RunDir = Annotated[
    Path, typer.Option("--run-dir", readable=False, help="Run directory of the server.")
]
RUN_DIR = Path("runs/default")
LARGE_BYTES = 1 << 28
"""Number of bytes from which on a progress bar is shown while a checkpoint is read."""
NOT_A_CHECKPOINT = (
    "not a checkpoint: a running server is writing it, or a server that died left it; the next "
    "start deletes it"
)


@app.command("list")
def list_checkpoints(
    run_dir: RunDir = RUN_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show the saved checkpoints. The command also works while a server runs."""

    def run() -> None:
        import json

        from rich.console import Console

        from fakevllm_server.cli.run_archive import RunArchive

        archive = RunArchive(run_dir)
        rows = _rows(archive)
        if as_json:
            print(json.dumps(rows, indent=2))
        elif not rows:
            print(f"{run_dir} has no checkpoint yet.")
        else:
            print(f"{run_dir} is at step {archive.last_step()}.")
            Console().print(_table(rows))
            if message := _change_message(archive, rows[-1]["step"]):
                print(message)
            for saved in archive.side_checkpoints():
                print(
                    f"{saved.folder} is of version {saved.version}, which training has left: it is "
                    "kept so that the version can still be released."
                )

    run_server_command(run)


@app.command()
def verify(
    step: Annotated[
        int | None, typer.Argument(help="Step of the checkpoint to verify. Default: all.")
    ] = None,
    run_dir: RunDir = RUN_DIR,
) -> None:
    """Check that checkpoint files are intact. The exit code is 1 if any are damaged or missing."""

    def run() -> None:
        from fakevllm_server.cli.run_archive import Integrity, RunArchive

        archive = RunArchive(run_dir)
        selected = archive.checkpoints() if step is None else [archive.checkpoint(step)]
        total = sum(archive.num_bytes(checkpoint) or 0 for checkpoint in selected)
        is_intact = True
        with _progress(total, "reading") as on_read:
            for checkpoint in reversed(selected):
                report = archive.verify(checkpoint, on_read)
                is_intact &= report.integrity in (Integrity.WHOLE, Integrity.REPLACED)
                print(f"{checkpoint.saved.folder}  {report}")
        if step is None:
            for name in archive.unknown_names():
                print(f"{name}  {NOT_A_CHECKPOINT}")
            if not selected:
                print(f"{run_dir} has no checkpoint yet.")
        if not is_intact:
            raise typer.Exit(1)

    run_server_command(run)


@app.command()
def export(
    step: Annotated[
        str, typer.Argument(metavar="STEP", help="Step of the checkpoint; omit it with --best.")
    ],
    folder: Annotated[
        str | None, typer.Argument(metavar="FOLDER", help="New or empty folder for the model.")
    ] = None,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Export the best checkpoint since the hooks or the job changed."
        ),
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(help="Folder or hub name of the model that the run started from, if moved."),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Type of the exported weights. Default: float32. Not for verl."),
    ] = None,
    allow_hub: Annotated[bool, typer.Option(help="Load the model by its name on the hub.")] = False,
    run_dir: RunDir = RUN_DIR,
) -> None:
    """Export a checkpoint as a model folder. LoRA adapters are merged into the weights. The command
    also works while a server runs."""

    def run() -> None:
        from fakevllm_runtime.errors import ConfigError
        from fakevllm_server.cli.run_archive import RunArchive

        to = Path(step if folder is None else folder)
        if best is not (folder is None) or not (best or step.isdecimal()):
            raise ConfigError("export takes STEP FOLDER, or --best FOLDER.")
        archive = RunArchive(run_dir)
        checkpoint = archive.best() if best else archive.checkpoint(int(step))
        if to.exists() and not (to.is_dir() and not any(to.iterdir())):
            raise ConfigError(f"{to} exists and is not an empty folder: choose another folder.")
        trained = archive.trained_model(model, allow_hub)
        if dtype is not None and trained.trainer == "verl":
            raise ConfigError(
                "--dtype is only for the embedded trainer: leave it out. The verl trainer exports "
                "in bfloat16 on GPUs."
            )
        _verify(archive, checkpoint)
        _export(archive, checkpoint, trained, to, dtype or "float32")
        print(f"Step {checkpoint.step} is exported: start a server with --model {to}")

    run_server_command(run)


@app.command()
def restore(
    step: Annotated[int, typer.Argument(help="Step of the checkpoint to continue from.")],
    run_dir: RunDir = RUN_DIR,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Make the next start of the server continue from a checkpoint. This discards all later
    training."""

    def run() -> None:
        from fakevllm_server.cli.run_archive import CheckpointRestore

        with contextlib.closing(CheckpointRestore(run_dir, step)) as restore:
            if restore.is_unnecessary:
                print(f"The run is at step {step} already: there is nothing to restore.")
                return
            _verify(restore.archive, restore.checkpoint)
            print(_discarded(restore))
            if not (yes or _is_confirmed()):
                print("Nothing was changed.")
                raise typer.Exit(1)
            restore.apply()
        print(f"The next server with --run-dir {run_dir} continues from step {step}.")

    run_server_command(run)


def _rows(archive: RunArchive) -> list[dict[str, Any]]:
    """Return the rows that `checkpoints list --json` prints: one row for each checkpoint, oldest
    first."""
    from datetime import UTC, datetime

    known = archive.checkpoints()
    best = archive.best() if known else None
    state = archive.release_state()
    return [
        {
            "step": checkpoint.step,
            "version": checkpoint.saved.version,
            "folder": str(archive.folder(checkpoint)),
            "saved_at": datetime.fromtimestamp(checkpoint.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "bytes": archive.num_bytes(checkpoint),
            "reward_mean": checkpoint.saved.reward_mean,
            "is_best": best is not None and checkpoint.step == best.step,
            "is_newest": checkpoint is known[0],
            "is_published": checkpoint.is_published,
            "is_released": checkpoint.saved.version == state.released,
            "is_candidate": checkpoint.saved.version == state.candidate,
            "is_pinned": checkpoint.saved.version in state.pinned,
        }
        for checkpoint in reversed(known)
    ]


def _change_message(archive: RunArchive, newest_step: int) -> str | None:
    """Return a message for the user if some checkpoints are left out of the search for the best
    checkpoint. A checkpoint is left out if the reward hooks or the job changed after it was saved.
    Return None if all checkpoints are compared."""
    changes = [(step, what) for step, what in archive.reward_changes() if step <= newest_step]
    if not changes:
        return None
    step, what = changes[-1]
    return (
        f"At step {step} {what}. The best checkpoint is chosen among the later ones, because "
        "earlier rewards may be on another scale."
    )


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table that `checkpoints list` prints. `rows` are the rows of the JSON output."""
    from rich.filesize import decimal
    from rich.table import Table

    table = Table()
    for name in ("step", "version"):
        table.add_column(name, justify="right")
    table.add_column("saved (UTC)", no_wrap=True)
    for name in ("size", "mean reward"):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("published")
    for row in rows:
        names = ("best", "newest", "released", "candidate", "pinned")
        marks = [mark for mark in names if row[f"is_{mark}"]]
        if row["is_released"] or row["is_candidate"]:
            marks.remove("pinned")
        table.add_row(
            str(row["step"]),
            str(row["version"]),
            row["saved_at"].replace("T", " ").removesuffix("Z"),
            "[red]missing[/]" if row["bytes"] is None else decimal(row["bytes"]),
            "–" if row["reward_mean"] is None else f"{row['reward_mean']:.3f}",
            ", ".join(marks),
            "yes" if row["is_published"] else "no",
        )
    return table


def _verify(archive: RunArchive, checkpoint: CheckpointInfo) -> None:
    """Check a checkpoint's files. Raises ConfigError if files are missing or have changed since
    they were written."""
    from fakevllm_runtime.errors import ConfigError
    from fakevllm_server.cli.run_archive import Integrity

    with _progress(archive.num_bytes(checkpoint) or 0, "verifying") as on_read:
        report = archive.verify(checkpoint, on_read)
    if report.integrity is not Integrity.WHOLE:
        raise ConfigError(
            f"{archive.folder(checkpoint)} is {report}: choose another step. "
            "`fakevllm-server checkpoints verify` shows which checkpoints are whole."
        )


def _export(
    archive: RunArchive, checkpoint: CheckpointInfo, trained: TrainedModel, to: Path, dtype: str
) -> None:
    """Export a checkpoint to the folder `to`.

    Raises ConfigError if the folder cannot be written. If the trainer fails, the error is printed
    and typer.Exit is raised.
    """
    import asyncio

    from rich.console import Console

    from fakevllm_runtime.errors import ConfigError
    from fakevllm_server.cli.run_archive import export
    from fakevllm_server.types.backend import BackendError, BackendRefused

    try:
        with Console(stderr=True).status(f"exporting step {checkpoint.step} of {archive.run_dir}"):
            asyncio.run(export(archive, checkpoint, trained, to.resolve(), dtype))
    except OSError as error:
        raise ConfigError(f"{to} cannot be written ({error}): choose another folder.") from None
    except BackendError as error:
        is_refused = isinstance(error, BackendRefused)
        log_hint = "" if is_refused else f"; see {archive.run_dir / 'export.log'}"
        message = f"Step {checkpoint.step} cannot be exported: {error}{log_hint}"
        print(f"fakevllm-server: {message}", file=sys.stderr)
        raise typer.Exit(2 if is_refused else 1) from None


def _discarded(restore: CheckpointRestore) -> str:
    """Return a text for the user that lists everything that a restore of a checkpoint discards."""
    step, num_groups = restore.checkpoint.step, len(restore.lost)
    lines = [f"To continue from step {step}, the following is discarded for good:"]
    if restore.last_step > step:
        lines.append(f"  all training after step {step}, up to step {restore.last_step}")
    if num_groups:
        plural = "s"[: num_groups > 1]
        lines.append(f"  {num_groups} group{plural}, marked as lost and never trained again")
    state = restore.archive.release_state()
    deleted = [one.step for one in restore.newer if one.saved.version not in state.pinned]
    if deleted:
        newer = ", ".join(map(str, reversed(deleted)))
        lines.append(f"  the checkpoint{'s'[: len(deleted) > 1]} of step {newer}")
    if state.released in [checkpoint.saved.version for checkpoint in restore.newer]:
        lines.append(
            f"Version {state.released} is released and answers apps: its checkpoint is kept."
        )
    return "\n".join(lines)


def _is_confirmed() -> bool:
    """Ask the user to confirm the restore. Return True if the user agrees.

    Raises ConfigError if the user does not answer, for example because stdin is closed.
    """
    from fakevllm_runtime.errors import ConfigError

    try:
        return typer.confirm("Continue?")
    except typer.Abort:
        print()
        raise ConfigError(
            "The question was not answered and nothing was changed: give --yes."
        ) from None


@contextlib.contextmanager
def _progress(total: int, label: str) -> Generator[OnRead]:
    """Show a progress bar while checkpoints are read, if stderr is a terminal and there are at
    least LARGE_BYTES bytes to read.

    `total` is the number of bytes to read. The context manager yields a function. The caller calls
    this function with the number of bytes of each chunk that was read.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (label, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    is_hidden = total < LARGE_BYTES or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_hidden) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)
