"""`fakevllm init` writes projects whose tests and hooks pass, for each app and each kind of reward,
and writes nothing after a mistake."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import tomllib
from itertools import zip_longest
from pathlib import Path
from typing import get_args

import pytest
from typer.testing import CliRunner, Result

from fakevllm.admission.dataset import read_tasks
from fakevllm.cli.main import app
from fakevllm.config.model import load
from fakevllm.errors import ConfigError
from fakevllm.hooks.check import check
from fakevllm.scaffold import new_folder
from fakevllm.scaffold.answers import APP, Answers, Question, complete
from fakevllm.scaffold.apps import ALIASES, AppName
from fakevllm.scaffold.command import ask_in_terminal
from fakevllm.scaffold.goods import GOODS, GoodName
from fakevllm.scaffold.project_files import TEMPLATES, project_files
from fakevllm_runtime.engines import REQUIRED_MODULES
from fakevllm_server.cli.main import app as server_app

ROOT = Path(__file__).parents[3]
APPS: tuple[AppName, ...] = get_args(AppName)
KINDS: tuple[GoodName, ...] = get_args(GoodName)
PAIRS = [
    (name, good or KINDS[index % len(KINDS)])
    for index, (name, good) in enumerate(zip_longest(APPS, KINDS))
]
"""Every app and every kind of reward at least once."""
FLAGS = ("--app", "codex", "--model", "demo", "--good", "exact")


def init(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


@pytest.mark.parametrize(("name", "good"), PAIRS)
async def test_the_tests_and_the_hooks_of_a_written_project_pass(
    name: AppName, good: GoodName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAKEVLLM_JUDGE_BASE_URL", raising=False)
    folder = tmp_path / "project"
    result = init(folder, "--app", name, "--model", "demo", "--good", good)
    assert result.exit_code == 0, result.output
    own_tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert own_tests.returncode == 0, own_tests.stdout
    assert list(folder.glob("tests/test_*.py")) and "skipped" not in own_tests.stdout
    assert (await check(folder / "hooks")).ok
    monkeypatch.chdir(folder)
    settings = load(None, {})
    assert settings.models.aliases == (ALIASES[name],)
    assert settings.hooks.path is not None and settings.dataset.file is not None
    trained, held_out = (
        {task.main_query for task in read_tasks(file, settings.dataset.field)}
        for file in (settings.dataset.file, settings.release.eval_dataset)
        if file is not None
    )
    assert (len(trained), len(held_out), trained & held_out) == (48, 16, set())
    assert all(row.keys() == {"question", "answer"} for row in json_rows(folder))
    text = (folder / "README.md").read_text()
    assert "    fakevllm up\n    python mock_user_request.py\n" in text
    assert "\n## How good the model is\n" in text and "`held_out.jsonl`" in text
    assert ("    fakevllm eval\n" in text) is (good != "thumbs")  # there, only users score answers
    assert settings.server["model"] == "demo"


def json_rows(folder: Path) -> list[dict[str, object]]:
    """Return the rows of all datasets in a folder."""
    texts = [file.read_text() for file in sorted(folder.glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.splitlines()]


@pytest.mark.parametrize("good", KINDS)
def test_a_written_project_becomes_gated_with_one_line(
    good: GoodName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = project_files("p", Answers("openai", "demo", good))
    gated = texts["fakevllm.toml"].replace("[release]\n", '[release]\nmode = "gated"\n')
    Path("fakevllm.toml").write_text(gated)
    assert load(None, {}).release.is_gated


def test_every_app_and_every_kind_is_in_its_table_and_has_its_templates() -> None:
    assert ALIASES.keys() == set(APPS) == {path.name for path in (TEMPLATES / "apps").iterdir()}
    assert GOODS.keys() == set(KINDS) == {path.name for path in (TEMPLATES / "good").iterdir()}


def test_the_configuration_of_an_app_is_the_file_of_adapters_apps() -> None:
    folders = [path for path in (ROOT / "adapters/apps").iterdir() if path.is_dir()]
    assert len(folders) == 7 and {folder.name for folder in folders} <= set(APPS)
    for name in APPS:
        texts = project_files("p", Answers(name, "demo", "exact"))
        assert any(path.startswith("app/") for path in texts)
        for file in (ROOT / "adapters/apps" / name).glob("*"):
            assert texts[f"app/{file.name}"] == file.read_text()


def test_the_wheel_gets_the_configurations_of_apps_and_every_template() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = wheel["targets"]["wheel"]["force-include"]
    assert included["adapters/apps"] == "fakevllm/scaffold/app_configurations"
    ignored = subprocess.run(
        ["git", "ls-files", "--others", "--ignored", "--exclude-standard", str(TEMPLATES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
    ).stdout.splitlines()
    assert [path for path in ignored if "__pycache__" not in path] == []


@pytest.mark.parametrize("name", ["my model", """a"b'c\\d $e`f`""", "é\x7f\n𝔪"])
def test_a_model_folder_is_written_as_an_absolute_path(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / name
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    assert init("project", "--model", name, "--yes").exit_code == 0
    settings = load(tmp_path / "project/fakevllm.toml", {})
    assert settings.server["model"] == str(model) and settings.job.lr == 1e-6


@pytest.mark.parametrize("good", KINDS)
def test_the_server_accepts_its_table_in_the_written_file(
    good: GoodName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = project_files("p", Answers("openai", "demo", good))
    Path("fakevllm.toml").write_text(texts["fakevllm.toml"])
    no_modules = dict.fromkeys(REQUIRED_MODULES, ())  # the engines need not be installed
    monkeypatch.setattr("fakevllm_runtime.engines.REQUIRED_MODULES", no_modules)
    flags = ["start", "--config", "fakevllm.toml", "--check"]
    result = CliRunner().invoke(server_app, flags)
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["run_dir"] == "runs/server"


def test_a_folder_that_is_not_empty_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    result = init(tmp_path, "--yes")
    assert result.exit_code == 2
    assert "is not empty: choose a new folder" in result.stderr
    assert files_below(tmp_path) == {"mine.txt"}


def test_an_empty_folder_and_a_folder_inside_another_project_are_accepted(tmp_path: Path) -> None:
    inner = tmp_path / "empty" / "new" / "inner"
    (tmp_path / "empty").mkdir()
    inode = (tmp_path / "empty").stat().st_ino
    assert init(tmp_path / "empty", *FLAGS).exit_code == 0
    assert (tmp_path / "empty").stat().st_ino == inode  # a shell may be in the folder
    assert init(inner, *FLAGS).exit_code == 0
    assert files_below(inner) == {
        path for path in files_below(tmp_path / "empty") if not path.startswith("new")
    }


@pytest.mark.parametrize("exists", [True, False])
def test_after_a_failure_nothing_is_left(
    exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "project"
    if exists:
        folder.mkdir()
    too_long = "x" * 300
    with pytest.raises(ConfigError, match="cannot be written: File name too long"):
        new_folder.write_folder(folder, {"a/b.txt": "first", too_long: "second"})
    assert files_below(tmp_path) == ({"project"} if exists else set())


def test_a_name_that_is_not_utf_8_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    result = init(tmp_path / "caf\udce9", *FLAGS)  # what Python makes of the byte 0xe9
    assert result.exit_code == 2 and "is not UTF-8: rename it" in result.stderr
    assert files_below(tmp_path) == set()


def test_ctrl_d_at_a_question_ends_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        ask_in_terminal(APP)


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_written_files_have_the_modes_of_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        assert init(tmp_path / "new", *FLAGS).exit_code == 0
    finally:
        os.umask(before)
    for path in (tmp_path / "new", *(tmp_path / "new").rglob("*")):
        full = 0o777 if path.is_dir() else 0o666
        assert stat.S_IMODE(path.stat().st_mode) == full & ~umask, path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nowhere"), "'nowhere' does not exist: give --model a local folder"),
        (("--model", "."), "has no config.json"),
        (("--model", "~nobody-has-this-name/m"), "is unknown: write the whole path"),
        (("--app", "emacs"), "--app"),
        (("--good", "nice"), "--good"),
        ((), "--app is missing"),
        (("--app", "openai", "--model", "demo"), "--good is missing"),
    ],
)
def test_a_mistake_is_refused_with_its_flag_and_nothing_is_written(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = init("project", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert files_below(tmp_path) == set()


def test_only_missing_flags_are_asked_for() -> None:
    asked: list[str] = []

    def ask(question: Question) -> str:
        asked.append(question.flag)
        return question.check("thumbs")

    answers = complete("codex", "demo", None, takes_defaults=False, ask=ask)
    assert answers == Answers("codex", "demo", "thumbs")
    assert asked == ["--good"]
    assert complete(None, None, "judge", takes_defaults=True, ask=ask) == Answers(
        "openai", "demo", "judge"
    )
    assert asked == ["--good"]
