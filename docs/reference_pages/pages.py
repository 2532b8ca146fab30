"""The table of the generated pages, and the function that writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.reference_pages import (
    codes,
    columns,
    commands,
    configuration,
    gpu_plans,
    hooks,
    job,
    metrics,
    routes,
    run_files,
)
from docs.reference_pages.markdown import Page

FOLDER = Path(__file__).parent.parent / "reference"
"""Folder of the generated pages."""
GENERATORS: dict[str, Callable[[], Page]] = {
    "configuration": configuration.page,
    "commands": commands.page,
    "job": job.page,
    "hooks": hooks.page,
    "codes": codes.page,
    "routes": routes.page,
    "metrics": metrics.page,
    "run_files": run_files.page,
    "ledger": columns.ledger_page,
    "journal": columns.journal_page,
    "gpu_plans": gpu_plans.page,
}
"""Function that returns the page, by the name of the page's file without `.md`."""


def write_all() -> None:
    """Write all pages, and delete pages that are no longer generated."""
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.glob("*.md"):
        if file.stem not in GENERATORS:
            file.unlink()
    for name, generate in GENERATORS.items():
        (FOLDER / f"{name}.md").write_text(generate().text, encoding="utf-8")
