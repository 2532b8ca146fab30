"""The page Learning in Chromium, with results on held-out rows, a break and costs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.ledger.store import Ledger
from tests.e2e.axe import axe_violations
from tests.e2e.console_process import login_url, start_console_of_run
from tests.e2e.npm_package import install_axe_core
from tests.e2e.processes import Processes, free_port
from tests.e2e.test_console_browser import (
    BOTH_SCHEMES,
    BOTH_SIZES,
    SIZES,
    browser_context,
    open_page,
    watched_page,
)
from tests.proxy.console.test_learning_page import made, measured, of_run

pytestmark = [pytest.mark.browser]

NUM_STEPS = 40
BREAK_AT = 25
EVALUATED = {0: 0.2, 10: 0.4, 20: 0.5, 40: 0.9}
"""Mean reward by the version that is evaluated."""
NUM_ROWS = 40


def write_ledger(path: Path) -> None:
    """Write a run of NUM_STEPS steps, whose hooks change, and one evaluation for each version of
    EVALUATED."""
    ledger = Ledger.open(path)
    for step in range(1, NUM_STEPS + 1):
        ledger.record(of_run(step, hook=f"hook {step // BREAK_AT}"))
    for number, (version, mean) in enumerate(EVALUATED.items()):
        num_right = round(mean * NUM_ROWS)
        rewards = [1.0] * num_right + [0.0] * (NUM_ROWS - num_right)
        rows = measured(version, rewards, eval_id=f"e{number}", at=1000.0 * number)
        for row in rows:
            ledger.record(replace(row, hook_hash=f"hook {version // BREAK_AT}" * 4))
    steps = [made(step, step, step, f"r{step}") for step in range(1, NUM_STEPS + 1)]
    ledger.apply_log("r", steps)
    assert ledger.drain() and ledger.health.ok
    ledger.close()


@BOTH_SCHEMES
@BOTH_SIZES
def test_held_out_results_are_in_the_chart_and_everything_fits(
    size: str, scheme: str, processes: Processes, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    width, height = SIZES[size]
    folder = Path(os.environ.get("FAKEVLLM_SCREENSHOTS", tmp_path))
    write_ledger(tmp_path / "run" / "ledger.sqlite")
    absent_proxy = f"http://127.0.0.1:{free_port()}"
    console = start_console_of_run(processes, tmp_path / "run", absent_proxy)
    viewport = {"width": width, "height": height}
    with browser_context(viewport=viewport, color_scheme=scheme) as context:
        problems: list[str] = []
        page = watched_page(context, problems)
        page.goto(login_url(console))
        page.wait_for_selector("h1:has-text('Now')")
        open_page(page, f"{console.url}/learning")
        page.wait_for_selector(".u-legend th:has-text('held-out rows')")
        page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        page.screenshot(path=folder / f"held-out-{size}-{scheme}.png", full_page=True)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert axe_violations(page, install_axe_core(pytestconfig)) == []
        assert problems == []


def test_a_new_result_appears_in_the_chart_without_a_click(
    processes: Processes, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "ledger.sqlite"
    ledger = Ledger.open(path)
    ledger.record(of_run(1))
    assert ledger.drain()
    console = start_console_of_run(processes, path.parent, f"http://127.0.0.1:{free_port()}")
    with browser_context() as context:
        page = watched_page(context, problems := [])
        page.goto(login_url(console))
        page.wait_for_selector("h1:has-text('Now')")
        open_page(page, f"{console.url}/learning")
        assert page.query_selector(".u-legend th:has-text('held-out rows')") is None
        for row in measured(0, [0.5] * 4):
            ledger.record(row)
        assert ledger.drain()
        page.wait_for_selector(".u-legend th:has-text('held-out rows')")
        page.wait_for_selector("td:has-text('before training')")
        assert problems == []
    ledger.close()
