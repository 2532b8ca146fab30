"""`fakevllm-server checkpoints`: what a run has saved, looked at, exported, gone back to. Nothing
heavy is imported before a command runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fakevllm_server.cli.exits import run_server_command

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
    help="What a run has saved: list, verify, export, restore.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RunDir = Annotated[Path, typer.Option("--run-dir", help="The server's.")]
RUN_DIR = Path("runs/default")
LARGE_BYTES = 1 << 28
"""What takes long enough to read that one wants to see it go on."""
STRANGER = (
    "no checkpoint: a server is at work on it, or one that died left it; the next start removes it"
)
MERGER = (
    "verl's own merger needs no GPU, and rounds to bfloat16: `python -m verl.model_merger merge "
    "--backend fsdp --local_dir {checkpoint} --target_dir {to}`; then copy tokenizer and chat "
    "template of {model} there."
)


@app.command("list")
def list_checkpoints(
    run_dir: RunDir = RUN_DIR,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Show what is saved. Also while a server runs."""

    def run() -> None:
        import json

        from rich.console import Console

        from fakevllm_server.cli.run_archive import RunArchive

        saved = RunArchive(run_dir)
        rows = _rows(saved)
        if as_json:
            print(json.dumps(rows, indent=2))
        elif not rows:
            print(f"{run_dir} has no checkpoint yet.")
        else:
            print(f"{run_dir} stands at step {saved.last_step()}.")
            Console().print(_table(rows))

    run_server_command(run)


@app.command()
def verify(
    step: Annotated[int | None, typer.Argument(help="Of one; else all are read.")] = None,
    run_dir: RunDir = RUN_DIR,
) -> None:
    """Read what is saved, and tell whether it is what was written. Exit code 1 where it is not."""

    def run() -> None:
        from fakevllm_server.cli.run_archive import Integrity, RunArchive

        saved = RunArchive(run_dir)
        asked = saved.checkpoints() if step is None else [saved.checkpoint(step)]
        total = sum(saved.num_bytes(one) or 0 for one in asked)
        is_well = True
        with _progress(total, "reading") as on_read:
            for one in reversed(asked):
                found = saved.verify(one, on_read)
                is_well &= found.verdict in (Integrity.WHOLE, Integrity.REPLACED)
                print(f"{one.saved.folder}  {found}")
        if step is None:
            for name in saved.strangers():
                print(f"{name}  {STRANGER}")
            if not asked:
                print(f"{run_dir} has no checkpoint yet.")
        if not is_well:
            raise typer.Exit(1)

    run_server_command(run)


@app.command()
def export(
    step: Annotated[str, typer.Argument(metavar="STEP", help="Left out with --best.")],
    folder: Annotated[
        str | None, typer.Argument(metavar="FOLDER", help="A new one, or empty.")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="Of the highest mean reward.")] = False,
    model: Annotated[
        str | None, typer.Option(help="The model that was trained, where it lies elsewhere now.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option(help="Default: float32, which loses nothing; not for verl."),
    ] = None,
    allow_hub: Annotated[bool, typer.Option(help="The model is a hub name.")] = False,
    run_dir: RunDir = RUN_DIR,
) -> None:
    """Make a model folder of a checkpoint, adapters merged in. Also while a server runs."""

    def run() -> None:
        from fakevllm_server.cli.run_archive import RunArchive
        from fakevllm_server.config.model import ConfigError

        to = Path(step if folder is None else folder)
        if best is not (folder is None) or not (best or step.isdecimal()):
            raise ConfigError("export takes STEP FOLDER, or --best FOLDER.")
        saved = RunArchive(run_dir)
        one = saved.best() if best else saved.checkpoint(int(step))
        if to.exists() and not (to.is_dir() and not any(to.iterdir())):
            raise ConfigError(f"{to} is there, and is no empty folder: name another.")
        trained = saved.trained_model(model, allow_hub)
        if dtype is not None and trained.trainer == "verl":
            raise ConfigError(
                "--dtype is the embedded trainer's; verl's exports bfloat16 on GPUs: leave it out."
            )
        _check(saved, one)
        _export(saved, one, trained, to, dtype or "float32")
        print(f"Step {one.step} is exported: start a server with --model {to}")

    run_server_command(run)


@app.command()
def restore(
    step: Annotated[int, typer.Argument(help="Of the checkpoint to go on from.")],
    run_dir: RunDir = RUN_DIR,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Let the next start go on from a checkpoint. What was trained since is given up for good."""

    def run() -> None:
        from fakevllm_server.cli.run_archive import CheckpointRestore

        with contextlib.closing(CheckpointRestore(run_dir, step)) as way:
            if way.is_none:
                print(f"The run stands at step {step} already: nothing to restore.")
                return
            _check(way.run, way.to)
            print(_given_up(way))
            if not (yes or _is_sure()):
                print("Nothing is changed.")
                raise typer.Exit(1)
            way.go()
        print(f"The next start of a server with --run-dir {run_dir} goes on from step {step}.")

    run_server_command(run)


def _rows(run: RunArchive) -> list[dict[str, Any]]:
    from datetime import UTC, datetime

    known = run.checkpoints()
    best = run.best() if known else None
    return [
        {
            "step": one.step,
            "version": one.saved.version,
            "folder": str(run.folder(one)),
            "saved_at": datetime.fromtimestamp(one.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "bytes": run.num_bytes(one),
            "reward_mean": one.saved.reward_mean,
            "is_best": best is not None and one.step == best.step,
            "is_newest": one is known[0],
            "is_published": one.is_published,
        }
        for one in reversed(known)
    ]


def _table(rows: Sequence[dict[str, Any]]) -> Table:
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
        marks = [mark for mark in ("best", "newest") if row[f"is_{mark}"]]
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


def _check(run: RunArchive, one: CheckpointInfo) -> None:
    """Raises ConfigError for a checkpoint that is not what was written."""
    from fakevllm_server.cli.run_archive import Integrity
    from fakevllm_server.config.model import ConfigError

    with _progress(run.num_bytes(one) or 0, "verifying") as on_read:
        found = run.verify(one, on_read)
    if found.verdict is not Integrity.WHOLE:
        raise ConfigError(
            f"{run.folder(one)} is {found}: take another step; "
            "`fakevllm-server checkpoints verify` tells which are whole."
        )


def _export(run: RunArchive, one: CheckpointInfo, of: TrainedModel, to: Path, dtype: str) -> None:
    """Raises ConfigError."""
    import asyncio

    from rich.console import Console

    from fakevllm_server.cli.run_archive import export
    from fakevllm_server.config.model import ConfigError
    from fakevllm_server.types.backend import BackendError, BackendRefused

    try:
        with Console(stderr=True).status(f"exporting step {one.step} of {run.run_dir}"):
            asyncio.run(export(run, one, of, to.resolve(), dtype))
    except OSError as error:
        raise ConfigError(f"{to} cannot be written ({error}): name another folder.") from None
    except BackendError as error:
        is_refused = isinstance(error, BackendRefused)
        log_file = "" if is_refused else f" ({run.run_dir / 'export.log'} is the log)"
        told = [f"step {one.step} cannot be exported: {error}{log_file}"]
        if of.trainer == "verl":
            told.append(MERGER.format(checkpoint=run.folder(one), to=to, model=of.model))
        print("\n".join(f"fakevllm-server: {line}" for line in told), file=sys.stderr)
        raise typer.Exit(2 if is_refused else 1) from None


def _given_up(way: CheckpointRestore) -> str:
    step, groups = way.to.step, len(way.lost)
    lines = [f"To go on from step {step}, this is given up for good:"]
    if way.last_step > step:
        lines.append(f"  what was trained after it, up to step {way.last_step}")
    if groups:
        lines.append(f"  {groups} group{'s'[: groups > 1]}, told as lost and never trained again")
    if way.newer:
        newer = ", ".join(str(one.step) for one in reversed(way.newer))
        lines.append(f"  the checkpoint{'s'[: len(way.newer) > 1]} of step {newer}")
    return "\n".join(lines)


def _is_sure() -> bool:
    from fakevllm_server.config.model import ConfigError

    try:
        return typer.confirm("Go on?")
    except typer.Abort:
        print()
        raise ConfigError("Nobody answered, and nothing is changed: give --yes.") from None


@contextlib.contextmanager
def _progress(total: int, what: str) -> Generator[OnRead]:
    """A bar on the terminal, where reading that much takes its time."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (what, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    is_idle = total < LARGE_BYTES or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_idle) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)
