"""The pages Feedback and Hooks of the console in Chromium, driven by Playwright. `.ci/browser`
installs both."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.console_process import login_url, start_console
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes
from tests.e2e.test_console_browser import SIZES, browser_context, watched_page
from tests.e2e.test_feedback import chat, start_stack
from tests.examples.webchat_app import running_webchat

pytestmark = [pytest.mark.browser]

TYPED = "a text that somebody has typed"
BY_LENGTH = """
def on_compute_relative_reward(valid_results, all_answers):
    return [len(answer["content"] or "") / 100 for answer in all_answers]
"""


@dataclass(frozen=True, slots=True)
class Rig:
    proxy: Process
    console: Process
    hooks: Path
    cookies: list[Any]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("console")
    with Processes(folder) as processes:
        _, proxy = start_stack(processes, folder)
        for number in range(4):
            chat(proxy, f"yes or no? {number}")
        wait_for_groups(proxy, 4, states="pooled trained dropped")
        console = start_console(processes, proxy, "--hooks", str(folder / "hooks"))
        with browser_context() as context:
            page = watched_page(context, [])
            page.goto(login_url(console))
            page.wait_for_selector("h1:has-text('Now')")
            cookies = context.cookies()
        yield Rig(proxy, console, folder / "hooks", cookies)


def test_from_a_thumb_in_the_web_chat_to_its_training_step_in_three_clicks(
    rig: Rig, tmp_path: Path
) -> None:
    with running_webchat(rig.proxy.url, tmp_path) as url, browser_context() as context:
        context.add_cookies(rig.cookies)
        problems: list[str] = []
        webchat, console = context.new_page(), watched_page(context, problems)
        console.goto(rig.console.url)
        webchat.goto(url)
        for number in (1, 2):
            webchat.fill("#text", f"[[say answer {number}]]")
            webchat.press("#text", "Enter")
            webchat.wait_for_function(
                f"document.querySelectorAll('.assistant:not(.waiting) .tools').length == {number}"
            )
        webchat.get_by_label("Good answer").first.click()  # gives the key a baseline
        webchat.wait_for_selector("[data-thumbs='1'][aria-pressed=true]")
        webchat.get_by_label("Bad answer").last.click()  # the first click
        console.get_by_role("link", name="Feedback", exact=True).click()  # the second click
        row = console.locator("#live tr", has_text="answer 2")
        row.get_by_text("It was trained in step").wait_for()
        row.get_by_role("link").click()  # the third click leads to the group
        console.wait_for_selector("h1:has-text('answer 2')")
        assert problems == []


def test_a_rated_answer_shows_what_becomes_of_it_and_typed_text_stays(rig: Rig) -> None:
    with browser_context() as context:
        context.add_cookies(rig.cookies)
        problems: list[str] = []
        page = watched_page(context, problems)
        page.goto(f"{rig.console.url}/feedback")
        first, second = page.locator(".queue article").nth(0), page.locator(".queue article").nth(1)
        second.locator("summary").click()
        second.locator("textarea").fill(TYPED)
        first.get_by_role("button", name="Bad").click()
        first.get_by_text("The proxy has stored your feedback").wait_for()
        assert second.locator("textarea").input_value() == TYPED
        second.get_by_role("button", name="Good").click()
        for article in (first, second):
            article.get_by_text("It was trained in step").wait_for()
        assert problems == []
    edits = rows(rig.proxy, "SELECT edited FROM feedback WHERE edited IS NOT NULL")
    assert [row["edited"] for row in edits] == [TYPED]


def test_edited_hooks_are_tried_and_then_reloaded(rig: Rig) -> None:
    with browser_context() as context:
        context.add_cookies(rig.cookies)
        problems: list[str] = []
        page = watched_page(context, problems)
        write_hooks(rig.hooks, BY_LENGTH)
        page.goto(f"{rig.console.url}/hooks")
        page.get_by_text("The files on disk differ").wait_for()
        page.get_by_role("button", name="Dry run").click()
        page.get_by_text("The proxy would take these hooks over").wait_for()
        page.get_by_role("link", name="Hooks").first.click()
        page.get_by_text("Reload the hooks of the proxy").click()
        page.get_by_role("checkbox").check()
        page.get_by_role("button", name="Reload", exact=True).click()
        page.get_by_text("took over from").first.wait_for()
        page.get_by_text("The proxy uses these files").wait_for()
        write_hooks(rig.hooks, PREFER_YES)
        page.get_by_text("have changed since this page was loaded").wait_for()
        assert problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_each_page_fits_its_window_and_has_no_errors(
    size: str, scheme: str, rig: Rig, tmp_path: Path
) -> None:
    width, height = SIZES[size]
    group_id = rows(rig.proxy, "SELECT group_id FROM groups LIMIT 1")[0]["group_id"]
    pages = {
        "feedback": "/feedback",
        "rate": f"/feedback/{group_id}",
        "hooks": "/hooks",
        "dry-run": "/hooks/dry-run",
    }
    folder = Path(os.environ.get("FAKEVLLM_SCREENSHOTS", tmp_path))
    viewport = {"width": width, "height": height}
    with browser_context(viewport=viewport, color_scheme=scheme) as context:
        context.add_cookies(rig.cookies)
        problems: list[str] = []
        page = watched_page(context, problems)
        for name, path in pages.items():
            page.goto(rig.console.url + path)
            page.wait_for_selector("main h1")
            page.screenshot(path=folder / f"{name}-{size}-{scheme}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert problems == []
