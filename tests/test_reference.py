"""The generated pages of the docs list what is in the code now."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from typer.main import get_command

from docs.reference_pages.markdown import COMMAND
from docs.reference_pages.pages import FOLDER, GENERATORS
from docs.reference_pages.serve_flags import serve_flags
from fakevllm.cli import main as proxy_cli
from fakevllm.config.model import Config
from fakevllm_adapters.http.client_body import FORBIDDEN_FIELDS
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.cli import main as server_cli

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    file = FOLDER / f"{name}.md"
    on_disk = file.read_text(encoding="utf-8") if file.exists() else ""
    assert on_disk == GENERATORS[name]().text, f"{file.name} is stale: run `{COMMAND}`"


def test_the_folder_of_generated_pages_has_no_other_page() -> None:
    assert {file.stem for file in FOLDER.glob("*.md")} == GENERATORS.keys()


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generated_page_is_in_the_navigation(name: str) -> None:
    assert f": reference/{name}.md\n" in (ROOT / "mkdocs.yml").read_text()


def test_the_wheel_has_no_generator_of_pages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert not [one for one in packages if one.startswith("docs")]


def test_the_pages_of_keys_have_every_key_of_the_configuration() -> None:
    listed = {
        f"{section.strip('[]')}.{row[0]}"
        for section, rows in tables("configuration").items()
        for row in rows
    }
    assert listed == set(keys_below(Config))
    job = [row[0] for section, rows in tables("job").items() if "[" not in section for row in rows]
    assert TrainJob.model_fields.keys() <= set(job)


def test_each_flag_of_serve_that_sets_a_key_stands_beside_its_key() -> None:
    [serve] = [flags for path, flags in commands(proxy_cli.app) if path == "serve"]
    assert set(serve_flags().values()) == serve - {"--config", "--log-format"}
    rows = {
        f"{section.strip('[]')}.{row[0]}": row
        for section, rows in tables("configuration").items()
        for row in rows
    }
    for key, flag in serve_flags().items():
        if key.startswith("job."):
            spelling = f"| `{key.removeprefix('job.')}` | the flag `{flag}` of `fakevllm serve` |"
            assert spelling in (FOLDER / "job.md").read_text()
        else:
            assert flag in rows[key]


@pytest.mark.parametrize(
    ("program", "app"), [("fakevllm", proxy_cli.app), ("fakevllm-server", server_cli.app)]
)
def test_the_page_of_commands_has_every_flag(program: str, app: Any) -> None:
    listed = tables("commands")
    for path, flags in commands(app):
        rows = listed[f"{program} {path}"]
        assert flags <= {flag for row in rows for flag in row[0].split("`, `")}, path


def test_the_row_of_allowed_fields_names_every_field_that_is_removed() -> None:
    [row] = [row for row in tables("configuration")["[limits]"] if row[0] == "allowed_fields"]
    assert {field for field in FORBIDDEN_FIELDS if f"`{field}`" in " ".join(row)} == (
        FORBIDDEN_FIELDS
    )


def tables(page: str) -> dict[str, list[list[str]]]:
    """Return the cells of the rows of each section of a generated page, by the section's title.
    The heads of the tables are left out. Backquotes around a cell are removed."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)
    return {
        title.strip("`"): [
            [cell.strip("`") for cell in line.strip("| ").split(" | ")]
            for line in body.splitlines()
            if line.startswith("| `")
        ]
        for title, body in sections
    }


def keys_below(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys of a configuration, without those of the tables `[job]` and `[server]`."""
    for name, field in model.model_fields.items():
        if prefix:
            yield f"{prefix}{name}"
        kinds: tuple[object, ...] = (field.annotation, *get_args(field.annotation))
        for place, kind in enumerate(kinds):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not TrainJob:
                of_names = ".NAME" if place > 0 and name == "routes" else ""
                yield from keys_below(kind, f"{prefix}{name}{of_names}.")


def commands(app: Any) -> Iterator[tuple[str, set[str]]]:
    """Yield each command with its flags, except those that are hidden."""
    waiting: list[tuple[str, Any]] = [("", get_command(app))]
    while waiting:
        path, command = waiting.pop()
        below = getattr(command, "commands", {})
        waiting += [(f"{path} {name}".strip(), one) for name, one in below.items()]
        if not below and not command.hidden:
            options = [one for one in command.params if one.param_type_name == "option"]
            yield path, {flag for one in options if not one.hidden for flag in one.opts}
