"""The docs agree with the code: their examples work, and their tables have what the code has.

The generated pages, which list each flag, key and route, are checked in test_reference.py.
"""

from __future__ import annotations

import ast
import json
import re
import sqlite3
import tomllib
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml
from fastapi.routing import APIRoute
from pydantic import BaseModel
from typer.testing import CliRunner

from fakevllm.cli import keys as keys_command
from fakevllm.cli import main
from fakevllm.config.model import Config, load
from fakevllm.hooks.check import check
from fakevllm.hooks.recorded_group import made_up_group
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.job.ajet_yaml import AJET_KEYS
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import Task
from fakevllm_server.backends.vllm.command import JOB_ARGUMENTS
from fakevllm_server.cli import main as server_cli
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.app import create_app
from fakevllm_server.web.routes.authorization import ADMIN_PATHS
from tests.adapters.job.ajet_jobs import stock

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
QUICKSTART = (ROOT / "docs/quickstart.md").read_text()
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part == "node_modules" for part in page.parts)
)
NOT_FOR_READERS = (
    r"(?<![\w.])/(work|home|root|tmp|opt|Users)/",
    r"pypi\.org|pythonhosted|download\.pytorch|registry\.npmjs",
)
"""Paths on somebody's machine, and hosts that a reader may be unable to reach."""


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def page_names() -> list[str]:
    return [str(page.relative_to(ROOT)) for page in PAGES]


def config_keys() -> set[str]:
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    return {
        f"{name}.{key}"
        for name, section in sections.items()
        for key in getattr(section, "model_fields", {})
    }


@pytest.mark.parametrize("app", [main.app, server_cli.app, keys_command.app])
def test_no_line_of_the_help_is_cut_off_in_a_terminal_of_80_columns(app: typer.Typer) -> None:
    output = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80"}).output
    assert "Commands:" in output and "..." not in output.partition("Commands:")[2]


def test_the_shown_configuration_holds_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "fakevllm.toml"
    file.write_text(blocks(CONFIGURATION, "toml")[0])
    assert load(file, {}) == Config()


def test_the_shown_configuration_has_every_key() -> None:
    whole = re.sub(r"^# (?=\w+ = )", "", blocks(CONFIGURATION, "toml")[0], flags=re.MULTILINE)
    sections = tomllib.loads(whole)
    for name, keys in sections.items():  # section by section: not all keys can be combined
        section = cast(type[BaseModel], Config.model_fields[name].annotation)
        section.model_validate(keys)
    shown = {f"{section}.{key}" for section, keys in sections.items() for key in keys}
    assert shown == config_keys()
    assert {key for key in TrainJob.model_fields} == {
        key.removeprefix("job.") for key in shown if key.startswith("job.")
    }


def test_the_page_about_the_job_shows_exactly_the_defaults_that_differ_from_agentjets() -> None:
    rows = job_rows("## Defaults that differ")
    stock_job: Any = yaml.safe_load(stock())
    differing: dict[str, tuple[str, str]] = {}
    for name, key in AJET_KEYS.items():
        theirs: Any = stock_job
        for part in key.split("."):
            theirs = theirs[part]
        ours = TrainJob().model_dump(mode="json")[name]
        if theirs != ours:
            differing[name] = (spelt(ours), spelt(theirs))
    differing["experiment_name"] = ("none", "the YAML file's name")
    assert {row[0].strip("`"): (row[1], row[2]) for row in rows} == differing


def test_the_page_about_the_job_names_the_settings_that_vllm_gets() -> None:
    shown = [re.findall(r"`(\w+)`", row[0]) for row in job_rows("## Which engine")]
    assert set(shown[0]) == set(JOB_ARGUMENTS.values())
    assert {name for names in shown for name in names} <= TrainJob.model_fields.keys()


def job_rows(heading: str) -> list[list[str]]:
    """Return the cells of the rows below a heading of docs/job.md, without the table's head."""
    section = (ROOT / "docs/job.md").read_text().partition(heading)[2].partition("\n## ")[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line[:3] == "| `"]


def spelt(value: object) -> str:
    return "none" if value is None else f"`{json.dumps(value)}`"


@pytest.mark.parametrize("page", page_names())
def test_toml_in_the_docs_loads(page: str, tmp_path: Path) -> None:
    for number, block in enumerate(blocks((ROOT / page).read_text(), "toml")):
        file = tmp_path / f"{number}.toml"
        file.write_text(block)
        load(file, {})


@pytest.mark.parametrize("page", [README, QUICKSTART], ids=["readme", "quickstart"])
async def test_the_shown_hooks_pass_check_hook(page: str, tmp_path: Path) -> None:
    for folder in write_hooks(page, tmp_path):
        report = await check(folder)
        assert report.ok, report.outcome.reason
        assert report.outcome.rewards is not None and len(set(report.outcome.rewards)) > 1


def write_hooks(page: str, parent: Path) -> set[Path]:
    """Write the hook files that a page shows, and return their folders."""
    folders: set[Path] = set()
    for block in blocks(page, "python"):
        name = re.match(r"# (\w+_hooks)/(\w+\.py)\n", block)
        assert name is not None, block
        folders.add(folder := parent / name[1])
        folder.mkdir(exist_ok=True)
        (folder / name[2]).write_text(block)
    return folders


async def test_the_readme_shows_a_hook_that_compares_with_the_right_answer_of_a_row(
    tmp_path: Path,
) -> None:
    write_hooks(README, tmp_path)
    [row_text] = re.findall(r'`(\{"question": .*?\})`', README)
    row = json.loads(row_text)
    texts = ["6 times 7 is 42.", "It is 7.", "It is 142.", "No idea."]

    async def rewards(metadata: dict[str, Any]) -> list[float | None] | None:
        task = Task(main_query=row["question"], metadata=metadata)
        answers = [{"content": text, "finish_reason": "stop"} for text in texts]
        group = replace(made_up_group(), task=task, answers=answers)
        return (await check(tmp_path / "answer_hooks", group=group)).outcome.rewards

    assert await rewards(row) == [1.0, 0.0, 0.0, 0.0]
    assert await rewards({}) == [None] * 4


def test_the_shown_ledger_queries_run(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    Ledger.open(file).close()
    queries = blocks((ROOT / "docs/ledger.md").read_text(), "sql")[0].split(";\n")
    with closing(sqlite3.connect(file)) as database:
        for query in filter(str.strip, queries):
            database.execute(query).fetchall()
    assert len(queries) >= 3


def test_the_shown_query_for_reasons_leaves_out_rows_of_evaluations(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    Ledger.open(file).close()
    query = blocks((ROOT / "docs/ledger.md").read_text(), "sql")[0].split(";\n")[0]
    with closing(sqlite3.connect(file)) as database:
        insert(database, "group_rows", group_id="app", state="dropped", reason="stale", kind="new")
        insert(database, "group_rows", group_id="row", state="served", kind="eval")
        assert database.execute(query).fetchall() == [("dropped", "stale", 1)]


@pytest.mark.parametrize(("last_step", "num_rows"), [(1, 1), (4, 4), (12, 6), (150, 5), (151, 6)])
def test_the_shown_learning_query_has_several_rows_also_for_a_short_run(
    last_step: int, num_rows: int, tmp_path: Path
) -> None:
    file = tmp_path / "ledger.sqlite"
    Ledger.open(file).close()
    [query] = [
        query
        for query in blocks((ROOT / "docs/ledger.md").read_text(), "sql")[0].split(";\n")
        if "policy_mean" in query
    ]
    with closing(sqlite3.connect(file)) as database:
        for step in range(last_step + 1):
            insert(database, "group_rows", group_id=f"g{step}", step=step, run_id="r")
            for index in range(2):
                insert(database, "sibling_rows", group_id=f"g{step}", index=index, reward=index)
        found = database.execute(query).fetchall()
    assert len(found) == num_rows
    assert found[0] == (1, 1, 0.5, None)


def insert(database: sqlite3.Connection, table: str, **values: object) -> None:
    """Insert a row. Required columns without a value get 0."""
    columns = database.execute(f"PRAGMA table_info({table})").fetchall()
    row = {name: 0 for _, name, _, is_required, _, _ in columns if is_required} | values
    names = ", ".join(f'"{name}"' for name in row)
    marks = ", ".join("?" * len(row))
    database.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(row.values()))


def test_the_quickstart_replays_a_dataset_again_with_fresh() -> None:
    played: set[str] = set()
    for dataset, flags in re.findall(r"^    fakevllm replay --dataset (\S+)(.*)", QUICKSTART, re.M):
        assert dataset not in played or "--fresh" in flags, f"plays nothing: {dataset}{flags}"
        played.add(dataset)
    assert played


def test_the_version_is_the_newest_changelog_heading() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    heading = re.search(r"^## \[(.+?)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert heading[1] == version


@pytest.mark.parametrize("page", page_names())
def test_relative_links_lead_to_existing_files(page: str) -> None:
    text = re.sub(r"`[^`\n]*`", "", (ROOT / page).read_text())
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [one for one in targets if not (ROOT / page).parent.joinpath(one).exists()] == []


@pytest.mark.parametrize("page", page_names())
def test_docs_name_no_machine_and_no_registry(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [found[0] for one in NOT_FOR_READERS for found in re.finditer(one, text)] == []


def test_every_hook_reason_is_explained() -> None:
    sources = "".join(file.read_text() for file in (ROOT / "fakevllm/hooks").glob("*.py"))
    page = (ROOT / "docs/reference/codes.md").read_text()
    raised = set(re.findall(r'f?"(hook_\w+):', sources))
    assert raised and {slug for slug in raised if f"| `{slug}` |" not in page} == set()


def test_every_recipe_is_in_contributing() -> None:
    recipes = re.findall(r"^(\w+)[^\n:=]*:", (ROOT / "justfile").read_text(), re.MULTILINE)
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert [recipe for recipe in recipes if f"`just {recipe}`" not in page] == []


def test_ci_installs_the_extras_that_the_readme_names() -> None:
    line = "pip install -c constraints.txt -e '.[embedded,test]' && .venv-test/bin/pytest"
    assert line in README
    assert "-c constraints.txt -e '.[embedded,test]'" in (ROOT / ".ci/run").read_text()


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert README.count("\n") <= 200


async def test_the_access_table_has_every_route_of_the_server(tmp_path: Path) -> None:
    app = create_app(ServerConfig("fake", tmp_path))
    await app.state.server.close()
    own = {route.path for route in app.routes if isinstance(route, APIRoute)}
    table = (ROOT / "docs/access.md").read_text().partition("## Roles")[2].partition("## Whose")[0]
    named = set(re.findall(r"(?<=[` ])(/\w+)`", table))
    assert own - named == set()
    for_admins = {
        path
        for line in table.splitlines()
        if "| 403 |" in line
        for path in own
        if f"{path}`" in line
    }
    assert for_admins == ADMIN_PATHS


def test_every_docstring_of_a_constant_or_field_follows_its_own_constant_or_field() -> None:
    """Two docstrings in a row mean that a name was inserted between another and its docstring."""
    for folder in ("fakevllm", "server", "adapters", "reward_hooks"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                body = node.body if isinstance(node, ast.Module | ast.ClassDef) else []
                docstrings = [_is_docstring(statement) for statement in body]
                assert (True, True) not in pairwise(docstrings), file


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_every_module_that_the_architecture_page_names_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:backends/)?[a-z_]+/(?:[a-z_]+/)*[a-z_]+)`", text))
    modules = {
        "/".join(path.with_suffix("").relative_to(ROOT).parts)
        for folder in ("fakevllm", "server", "adapters")
        for path in (ROOT / folder).rglob("*.py")
    }
    named = {name for name in named if not (ROOT / "server" / name).is_dir()}
    missing = {name for name in named if not any(one.endswith(f"/{name}") for one in modules)}
    assert len(named) > 20 and missing == set()
