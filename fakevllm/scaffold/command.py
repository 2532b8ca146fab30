"""Run `fakevllm init`: get the answers, write the folder, and print the next commands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer

from fakevllm.errors import ConfigError
from fakevllm.scaffold.answers import Question, complete
from fakevllm.scaffold.new_folder import check_new, has_files, write_folder
from fakevllm.scaffold.project_files import INDENT, NEXT_COMMANDS, project_files
from fakevllm.scaffold.skills import ASSISTANT_FOLDERS, add_files, skill_files, skill_names


def run_init(
    folder: Path | None,
    app: str | None,
    model: str | None,
    good: str | None,
    *,
    takes_defaults: bool,
    with_skills: bool,
) -> None:
    """Write a new project into `folder`. If `with_skills` is True, also add the skills
    (instructions for coding assistants).

    Suppose that `folder` is None or has files. If `with_skills` is True and no flag describes a
    project, only the skills are added. Otherwise, ConfigError is raised.

    Also raises ConfigError if an answer is missing or not valid, or if a skill that the user has
    changed would be overwritten.
    """
    describes_project = (app, model, good) != (None, None, None)
    if with_skills and not describes_project and (folder is None or has_files(folder)):
        add_skills(folder or Path())
        return
    if folder is None:
        raise ConfigError("DIR is missing: name the folder of the new project.")
    check_new(folder)  # before the user answers questions
    ask = ask_in_terminal if sys.stdin.isatty() else None
    answers = complete(app, model, good, takes_defaults=takes_defaults, ask=ask)
    texts = project_files(folder.resolve().name, answers)
    write_folder(folder, texts | skill_files() if with_skills else texts)
    print(f"{folder} is ready for {answers.app}. Next, each command in a terminal of its own:\n")
    for command in NEXT_COMMANDS:
        print(f"{INDENT}cd {shlex.quote(str(folder))} && {command}")
    print(f"\n{folder / 'README.md'} explains the files.")
    if with_skills:
        print_skills(folder)


def add_skills(folder: Path) -> None:
    """Add the skills to a folder that exists."""
    if not add_files(folder, skill_files()):
        print("All skills were there already.")
    print_skills(folder)


def print_skills(folder: Path) -> None:
    places = " and ".join(str(folder / place) for place in ASSISTANT_FOLDERS)
    print(f"The skills {', '.join(skill_names())} are in {places}.")
    print("Claude Code and opencode know them after a restart in this folder.")


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
