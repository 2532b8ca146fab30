"""The generated pages of the docs list what is in the code now."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from docs.reference_pages.markdown import COMMAND
from docs.reference_pages.pages import FOLDER, GENERATORS

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
