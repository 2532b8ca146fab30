"""The command `fakevllm import`, which makes a dataset from a log of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm_runtime.commands import run_command


def import_logs(
    log: Annotated[
        Path, typer.Argument(metavar="FILE", help="Log of requests to OpenAI's or Anthropic's API.")
    ],
    target: Annotated[
        Path, typer.Option("--to", help="Dataset to write; its name ends with .jsonl.")
    ],
) -> None:
    """Make a dataset for `replay` from a log of requests."""

    def run() -> None:
        from fakevllm.request_logs.command import run_import

        run_import(log.expanduser(), target.expanduser())

    run_command(run)
