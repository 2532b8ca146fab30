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
        from fakevllm.config.model import load
        from fakevllm.export.command import ExportSettings, run_export

        settings = load(config, {"proxy": {"run_dir": run_dir}})
        run_export(
            ExportSettings(
                ledger=settings.ledger_file if ledger is None else ledger,
                format_name=format_name,
                target=target,
                where=where,
                last=last,
                min_difference=min_difference,
            )
        )

    run_command(run)
