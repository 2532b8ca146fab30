"""The docs site: its navigation has every page, and links work on the site and in a repository."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
ON_SITE = {"README.md", "job.md", "records.md", "pictures/curve.png", "server/README.md"}


def site_hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site_hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = site_hooks()


@pytest.mark.parametrize("page", [page.name for page in sorted((ROOT / "docs").glob("*.md"))])
def test_every_page_of_the_docs_is_in_the_navigation(page: str) -> None:
    assert f": {page}\n" in (ROOT / "mkdocs.yml").read_text()


@pytest.mark.parametrize(
    ("page", "text", "on_site"),
    [
        ("docs/job.md", "[tokens](records.md#tokens)", "[tokens](records.md#tokens)"),
        ("docs/job.md", "[routes](../server/README.md)", "[routes](server/README.md)"),
        ("docs/job.md", "[server](../server)", "[server](server/README.md)"),
        ("server/README.md", "[the job](../docs/job.md)", "[the job](../job.md)"),
        ("README.md", "[job](docs/job.md)", "[job](job.md)"),
        ("docs/job.md", "[spec.py](../fakevllm/hooks/spec.py)", "`fakevllm/hooks/spec.py`"),
        ("docs/job.md", "[how](../LICENSE)", "how (`LICENSE`)"),
        ("docs/job.md", "[gone](gone.md)", "[gone](gone.md)"),
        ("docs/job.md", "[here](#there)", "[here](#there)"),
        ("docs/job.md", "[`a`](job.md), `[b](../LICENSE)`", "[`a`](job.md), `[b](../LICENSE)`"),
        ("docs/job.md", "```\n[b](../LICENSE)\n```", "```\n[b](../LICENSE)\n```"),
    ],
)
def test_a_link_is_translated_for_the_site(page: str, text: str, on_site: str) -> None:
    assert HOOKS.rewrite_links(text, page, ON_SITE) == on_site


def test_a_picture_is_found_from_a_page_outside_docs() -> None:
    page = HOOKS.rewrite_links("![Curve](docs/pictures/curve.png)", "README.md", ON_SITE)
    assert page == "![Curve](pictures/curve.png)"


def test_a_list_is_laid_out_for_python_markdown() -> None:
    page = "Two:\n* one\n* two\n\n  more\n* three\n\n```\nx:\n* y\n```"
    laid_out = "Two:\n\n* one\n* two\n\n    more\n\n* three\n\n```\nx:\n* y\n```"
    assert HOOKS.for_python_markdown(page) == laid_out


def test_pages_for_coding_agents_are_not_on_the_site() -> None:
    pages = set(HOOKS.pages_outside_docs(ROOT))
    assert {"README.md", "ARCHITECTURE.md", "server/README.md"} <= pages
    assert not {"AGENTS.md", "CLAUDE.md", "docs/job.md"} & pages


def test_a_page_that_fetches_from_another_host_is_found() -> None:
    assert HOOKS.REMOTE.search('<script src="https://a.example/x.js"></script>')
    assert HOOKS.REMOTE.search('<link rel="stylesheet" href="//a.example/x.css">')
    assert not HOOKS.REMOTE.search('<a href="https://a.example/">elsewhere</a>')
