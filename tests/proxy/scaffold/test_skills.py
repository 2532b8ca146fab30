"""The skills have the form that coding assistants read, name commands that exist, and are written
where the assistants look."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner, Result

from fakevllm.cli.main import app
from fakevllm.scaffold.skills import (
    ASSISTANT_FOLDERS,
    SKILL_FILE,
    skill_files,
    skill_names,
    skills_folder,
)
from fakevllm_server.cli.main import app as server_app
from tests.proxy.scaffold.skill_blocks import shell_blocks, skill_text

ROOT = Path(__file__).parents[3]
PROGRAMS: dict[str, Any] = {
    "fakevllm": get_command(app),
    "fakevllm-server": get_command(server_app),
}
MAX_NAME, MAX_DESCRIPTION, MAX_LINES = 64, 1024, 250
"""Limits of Claude Code and opencode for a name and a description, and ours for the whole file."""


def init(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def written_paths() -> set[str]:
    return {f"{place}/{name}/{SKILL_FILE}" for place in ASSISTANT_FOLDERS for name in skill_names()}


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


def named_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of fakevllm in blocks and in code spans."""
    outside = re.sub(r"^ *```\w*\n.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = "\n".join(shell_blocks(text)).splitlines() + re.findall(r"`([^`\n]+)`", outside)
    for line in lines:
        match = re.match(r" *(fakevllm(?:-server)? .*)", line)
        if match:
            words = shlex.split(match[1].partition(">")[0])
            yield words[: words.index("|")] if "|" in words else words


@pytest.mark.parametrize("name", skill_names())
def test_the_front_matter_has_a_name_and_says_when_to_use_the_skill(name: str) -> None:
    text = skill_text(name)
    match = re.match(r"---\n(.*?)\n---\n\n# ", text, re.DOTALL)
    assert match is not None
    front_matter = yaml.safe_load(match[1])
    assert front_matter.keys() == {"name", "description"}
    assert front_matter["name"] == name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) and len(name) <= MAX_NAME
    assert " Use when " in front_matter["description"]
    assert len(front_matter["description"]) <= MAX_DESCRIPTION
    assert text.count("\n") <= MAX_LINES


@pytest.mark.parametrize("name", skill_names())
def test_each_step_is_numbered_and_has_a_command(name: str) -> None:
    steps = skill_text(name).partition("\n## Steps\n")[2].partition("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", steps, re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) >= 5
    assert len(shell_blocks(steps)) == len(shell_blocks(skill_text(name))) == len(numbers)


@pytest.mark.parametrize("name", skill_names())
def test_every_command_and_flag_that_a_skill_names_exists(name: str) -> None:
    num_commands = 0
    for words in named_commands(skill_text(name)):
        command = PROGRAMS[words[0]]
        rest = words[1:]
        while hasattr(command, "commands"):
            assert rest and rest[0] in command.commands, words
            command = command.commands[rest.pop(0)]
        flags = {flag for parameter in command.params for flag in parameter.opts} | {"--help"}
        assert {word for word in rest if word.startswith("--")} <= flags, words
        num_commands += 1
    assert num_commands >= 3


@pytest.mark.parametrize("name", skill_names())
def test_a_skill_links_to_no_file_that_a_project_lacks(name: str) -> None:
    assert re.findall(r"\]\((?!https?:)", skill_text(name)) == []
    named = re.findall(r"skill `([\w-]+)`", skill_text(name))
    assert set(named) <= set(skill_names())


def test_the_wheel_gets_the_skills() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert wheel["targets"]["wheel"]["force-include"]["skills"] == (
        "fakevllm/scaffold/assistant_skills"
    )
    assert skills_folder() == ROOT / "skills"
    assert {path.name for path in skills_folder().iterdir()} == set(skill_names())


def test_a_new_project_gets_the_skills_in_both_places(tmp_path: Path) -> None:
    assert init(tmp_path / "with", "--skills", "--yes").exit_code == 0
    assert init(tmp_path / "without", "--yes").exit_code == 0
    added = files_below(tmp_path / "with") - files_below(tmp_path / "without")
    assert added == written_paths()
    for path, text in skill_files().items():
        assert (tmp_path / "with" / path).read_text() == text


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize("flags", [(), ("--yes",)])
def test_an_existing_folder_gets_only_the_skills(
    has_folder: bool, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    folder = (tmp_path,) if has_folder else ()
    for is_repeated in (False, True):
        result = init(*folder, "--skills", *flags)
        assert result.exit_code == 0, result.output
        assert files_below(tmp_path) == {"mine.txt"} | written_paths()
        assert ("were there already" in result.output) is is_repeated


@pytest.mark.parametrize("flags", [(), ("--yes",)])
def test_a_changed_skill_is_not_overwritten_and_nothing_is_written(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    changed = tmp_path / sorted(written_paths())[-1]
    changed.parent.mkdir(parents=True)
    changed.write_text("mine")
    result = init(tmp_path, "--skills", *flags)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"{changed} differs from this version's skill: rename or delete it" in line
    assert files_below(tmp_path) == {changed.relative_to(tmp_path).as_posix()}


def test_after_a_failure_no_new_skill_is_left(tmp_path: Path) -> None:
    (tmp_path / ".claude").mkdir()
    (tmp_path / ".opencode").symlink_to("nowhere")
    result = init(tmp_path, "--skills")
    assert result.exit_code == 2 and "cannot be written: " in result.stderr
    assert files_below(tmp_path) == {".opencode"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "DIR is missing: name the folder"),
        (("--yes",), "DIR is missing: name the folder"),
        (("--skills", "--app", "openai"), "DIR is missing: name the folder"),
        ((".", "--skills", "--app", "openai"), ". is not empty: choose a new folder"),
    ],
)
def test_a_project_needs_a_new_folder_with_skills_too(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    result = init(*arguments)
    assert result.exit_code == 2 and message in result.stderr
    assert files_below(tmp_path) == {"mine.txt"}
