"""The command `fakevllm export`, which writes logged groups as a dataset file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fakevllm.cli.options import ConfigFile, RunDir
from fakevllm_runtime.commands import run_command


def export(
    format_name: Annotated[
        Literal["messages", "sft", "preference", "kto", "groups"],
        typer.Option("--as", help="Format of the rows."),
    ],
    target: Annotated[
        Path, typer.Option("--to", help="File to write; its name ends with .jsonl or .parquet.")
    ],
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger file. Default: the one in --run-dir.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(metavar="SQL", help="Condition on the columns of the ledger's view `groups`."),
    ] = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="Export only so many groups, the newest ones.")
    ] = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Dataset file whose rows the requests came from. Default: dataset.file."),
    ] = None,
    min_difference: Annotated[
        float | None,
        typer.Option(
            min=0, help="With --as preference: smallest difference of two rewards in a pair."
        ),
    ] = None,
    run_dir: RunDir = None,
    config: ConfigFile = None,
) -> None:
    """Write logged requests as a dataset file for trainers."""

    def run() -> None:
        from fakevllm.admission.dataset import tasks_by_id
        from fakevllm.admission.held_out import HeldOutRows
        from fakevllm.admission.row_requests import read_held_out_rows
        from fakevllm.config.model import DEFAULT_FILE, load
        from fakevllm.export.command import ExportSettings, run_export

        file = config
        if file is None and run_dir is not None and (run_dir / DEFAULT_FILE).is_file():
            file = run_dir / DEFAULT_FILE
        settings = load(file, {"proxy": {"run_dir": run_dir}, "dataset": {"file": dataset}})
        rows, held_out = settings.dataset, settings.release.eval_dataset
        run_export(
            ExportSettings(
                ledger=settings.ledger_file if ledger is None else ledger.expanduser(),
                format_name=format_name,
                target=target.expanduser(),
                where=where,
                last=last,
                min_difference=min_difference,
                held_out=(
                    HeldOutRows() if held_out is None else read_held_out_rows(held_out, rows.field)
                ),
                tasks=tasks_by_id(rows.file, rows.field),
            )
        )

    run_command(run)
