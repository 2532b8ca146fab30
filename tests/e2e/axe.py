"""Checks of a web page's accessibility with axe-core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_VIOLATIONS = """
async () => {
  const { violations } = await axe.run(document, { resultTypes: ["violations"] });
  return violations.flatMap(({ id, nodes }) =>
    nodes.map(({ html, failureSummary }) => `${id}: ${html}: ${failureSummary}`));
}
"""


def axe_violations(page: Any, script: Path) -> list[str]:
    """Return the violations that axe-core finds in the page that a Playwright page shows.

    Playwright evaluates the script with the browser's debugger. A script element would be refused,
    because the Content-Security-Policy of a page may allow only the files of its own site.
    """
    page.evaluate(script.read_text())
    return page.evaluate(_VIOLATIONS)
