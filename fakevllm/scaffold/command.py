"""Run `fakevllm init`: get the answers, write the folder, and print the next commands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer

from fakevllm.errors import ConfigError
from fakevllm.scaffold.answers import Question, complete
from fakevllm.scaffold.new_folder import check_new, write_folder
from fakevllm.scaffold.project_files import INDENT, NEXT_COMMANDS, project_files


def run_init(
    folder: Path, app: str | None, model: str | None, good: str | None, *, takes_defaults: bool
) -> None:
    """Write a new project into `folder`. Raises ConfigError if the folder is not empty, or if an
    answer is missing or not valid."""
    check_new(folder)  # before the user answers questions
    ask = ask_in_terminal if sys.stdin.isatty() else None
    answers = complete(app, model, good, takes_defaults=takes_defaults, ask=ask)
    write_folder(folder, project_files(folder.resolve().name, answers))
    print(f"{folder} is ready for {answers.app}. Next, each command in a terminal of its own:\n")
    for command in NEXT_COMMANDS:
        print(f"{INDENT}cd {shlex.quote(str(folder))} && {command}")
    print(f"\n{folder / 'README.md'} explains the files.")


def ask_in_terminal(question: Question) -> str:
    """Ask the user a question until the answer is valid, and return it. Raises KeyboardInterrupt
    after Ctrl-C or Ctrl-D."""

    def check(text: str) -> str:
        try:
            return question.check(text)
        except ConfigError as error:  # translated: typer prints it and asks again
            raise typer.BadParameter(str(error)) from None

    try:
        return typer.prompt(question.text, default=question.default, value_proc=check)
    except typer.Abort:  # translated: all commands end in the same way after Ctrl-C
        print()
        raise KeyboardInterrupt from None
