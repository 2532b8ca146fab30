"""The command `fakevllm init`, which writes the folder of a new project."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm.scaffold.apps import AppName
from fakevllm.scaffold.goods import GoodName
from fakevllm_runtime.commands import run_command


def init(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR",
            help="Folder to write. It must be new or empty, unless only skills are added.",
        ),
    ] = None,
    app: Annotated[AppName | None, typer.Option(help="App that sends the requests.")] = None,
    model: Annotated[str | None, typer.Option(help="Model folder, or `demo`.")] = None,
    good: Annotated[
        GoodName | None,
        typer.Option(
            help="What makes an answer good. exact: it equals the reference. format: it has a "
            "given form. judge: another model likes it. thumbs: users like it. command: a command "
            "of yours accepts it."
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Take the default for every flag that is missing.")
    ] = False,
    skills: Annotated[
        bool,
        typer.Option(
            "--skills",
            help="Also write instructions for Claude Code and opencode. Without DIR, or if DIR is "
            "an existing project, only these are added.",
        ),
    ] = False,
) -> None:
    """Write a new project: configuration, hooks with tests, a dataset. Asks for missing flags."""

    def run() -> None:
        from fakevllm.scaffold.command import run_init

        run_init(folder, app, model, good, takes_defaults=yes, with_skills=skills)

    run_command(run)
