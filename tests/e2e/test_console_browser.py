"""The console in Chromium, driven by Playwright. `.ci/browser` installs both.

The environment variable FAKEVLLM_SCREENSHOTS names a folder for screenshots of all pages.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from fakevllm.config.key_file import KeyFile
from fakevllm.console.login_link import NEW_LINK_INTERVAL_S
from fakevllm_adapters.protocol.keys import named_key
from tests.e2e.console_process import login_url, start_console
from tests.e2e.ledgers import rows, wait_for_groups
from tests.e2e.processes import Process, Processes
from tests.e2e.stack import VALID, Stack, post

pytestmark = [pytest.mark.browser]

SIZES = {"desktop": (1280, 800), "phone": (375, 812)}
PAGES = {"now": "/", "learning": "/learning", "groups": "/groups", "sessions": "/sessions"}


@pytest.fixture(scope="module")
def console(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    bodies = [
        {**VALID, "messages": [{"role": "user", "content": f"yes or no? {n}"}]} for n in range(6)
    ]
    for body in bodies:
        assert post(stack.three, body).status_code == 200
    wait_for_groups(stack.three, len(bodies))
    with Processes(tmp_path_factory.mktemp("console")) as processes:
        yield start_console(processes, stack.three)


@contextmanager
def browser_context(**settings: Any) -> Generator[Any]:
    driver: Any = import_module("playwright.sync_api")
    with driver.sync_playwright() as playwright:
        chromium = shutil.which("chromium") or os.environ["CHROMIUM"]
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        context: Any = browser.new_context(**settings)
        context.set_default_timeout(60_000)
        yield context
        browser.close()


def watched_page(context: Any, problems: list[str]) -> Any:
    """Return a new page. Errors of its scripts, refusals of its Content-Security-Policy and
    requests to other sites are added to `problems`."""
    page: Any = context.new_page()

    def on_error(error: object) -> None:
        problems.append(str(error))

    def on_console(message: Any) -> None:
        if message.type == "error":
            problems.append(message.text)

    def on_request(request: Any) -> None:
        if not request.url.startswith("http://127.0.0.1:"):
            problems.append(request.url)

    page.on("pageerror", on_error)
    page.on("console", on_console)
    page.on("request", on_request)
    return page


@pytest.fixture(scope="module")
def cookies(console: Process) -> list[Any]:
    """The cookies of a browser that has opened the printed link."""
    with browser_context() as context:
        page = watched_page(context, problems := [])
        page.goto(login_url(console))
        page.wait_for_selector("h1:has-text('Now')")
        assert problems == []
        return context.cookies()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_each_page_fits_its_window_and_has_no_errors(
    size: str, scheme: str, console: Process, cookies: list[Any], stack: Stack, tmp_path: Path
) -> None:
    width, height = SIZES[size]
    group_id = rows(stack.three, "SELECT group_id FROM groups LIMIT 1")[0]["group_id"]
    session_id = rows(stack.three, "SELECT session_id FROM groups LIMIT 1")[0]["session_id"]
    pages = PAGES | {"group": f"/groups/{group_id}", "session": f"/sessions/{session_id}"}
    folder = Path(os.environ.get("FAKEVLLM_SCREENSHOTS", tmp_path))
    viewport = {"width": width, "height": height}
    with browser_context(viewport=viewport, color_scheme=scheme) as context:
        context.add_cookies(cookies)
        problems: list[str] = []
        page = watched_page(context, problems)
        for name, path in pages.items():
            page.goto(console.url + path)
            page.wait_for_selector("main h1")
            if name == "learning":
                page.wait_for_selector(".chart canvas")
            page.screenshot(path=folder / f"{name}-{size}-{scheme}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert problems == []


def test_a_new_request_appears_without_a_click(
    console: Process, cookies: list[Any], stack: Stack
) -> None:
    with browser_context() as context:
        context.add_cookies(cookies)
        problems: list[str] = []
        page = watched_page(context, problems)
        for path in ("/groups", "/"):
            page.goto(console.url + path)
            page.wait_for_selector("main h1")
            page.wait_for_timeout(1000)  # the event stream is open by then
            text = f"a question for {'now' if path == '/' else 'groups'}"
            messages = [{"role": "user", "content": text}]
            assert post(stack.three, {**VALID, "messages": messages}).status_code == 200
            page.wait_for_selector(f"td a:has-text('{text}')")
        assert problems == []


def test_the_last_of_many_changes_is_shown_although_updates_are_limited(
    console: Process, cookies: list[Any], stack: Stack
) -> None:
    with browser_context() as context:
        context.add_cookies(cookies)
        problems: list[str] = []
        page = watched_page(context, problems)
        page.goto(f"{console.url}/groups?text=burst")
        page.wait_for_timeout(1000)  # the event stream is open by then
        page.evaluate("document.querySelector('#live').dataset.intervalS = 6")
        for number in range(3):
            messages = [{"role": "user", "content": f"burst {number}"}]
            assert post(stack.three, {**VALID, "messages": messages}).status_code == 200
            page.wait_for_timeout(2500)  # longer than the interval between two events
        page.wait_for_selector("td a:has-text('burst 2')", timeout=15_000)
        assert problems == []


def test_a_chart_appears_with_the_first_step(
    console: Process, cookies: list[Any], stack: Stack
) -> None:
    def no_points(route: Any) -> None:
        route.fulfill(json=[])

    with browser_context() as context:
        context.add_cookies(cookies)
        problems: list[str] = []
        page = watched_page(context, problems)
        page.route("**/learning/curve*", no_points)
        page.goto(f"{console.url}/learning")
        page.wait_for_timeout(1000)  # the event stream is open by then
        assert not page.is_visible(".chart")
        page.unroute("**/learning/curve*")
        assert post(stack.three, VALID).status_code == 200
        page.wait_for_selector(".chart canvas")
        assert problems == []


def test_a_page_whose_login_has_ended_says_that_it_is_stale(
    stack: Stack, processes: Processes
) -> None:
    console = start_console(processes, stack.three)
    with browser_context() as context:
        page, other = watched_page(context, []), watched_page(context, [])
        page.goto(login_url(console))
        page.wait_for_selector("h1:has-text('Now')")
        page.wait_for_timeout(1000)  # the event stream is open by then
        assert not page.is_visible("#stale")
        other.goto(console.url)
        other.click("button:has-text('Log out')")
        other.wait_for_selector("h1:has-text('Log in')")
        page.wait_for_selector("#stale", timeout=30_000)
        page.click("#stale a")
        page.wait_for_selector("h1:has-text('Log in')")


def test_markup_of_an_app_runs_nothing(console: Process, cookies: list[Any], stack: Stack) -> None:
    text = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
    messages = [{"role": "user", "content": text}]
    assert post(stack.three, {**VALID, "messages": messages}).status_code == 200
    with browser_context() as context:
        context.add_cookies(cookies)
        problems: list[str] = []
        page = watched_page(context, problems)
        page.goto(f"{console.url}/groups?text=onerror")
        page.click("td.main a")
        page.wait_for_selector("article")
        assert text in page.inner_text("h1")
        assert page.evaluate("window.hit") is None
        assert problems == []


def test_a_browser_logs_in_by_a_new_link_and_by_a_key_and_comes_back_to_its_page(
    stack: Stack, processes: Processes, tmp_path: Path
) -> None:
    keys = tmp_path / "console_keys"
    KeyFile(keys).add(named_key("the-key-of-ops", "ops", "2026-01-01"))
    console = start_console(processes, stack.three, "--key-file", str(keys))
    first_link = login_url(console)
    with browser_context() as context:
        page = watched_page(context, [])
        page.goto(f"{console.url}/groups?state=trained")
        page.fill("input[name=key]", "the-key-of-ops")
        page.click("button:has-text('Log in')")
        page.wait_for_selector("h1:has-text('Groups')")
        assert page.url == f"{console.url}/groups?state=trained"
        page.click("button:has-text('Log out')")
        page.wait_for_selector("h1:has-text('Log in')")
        page.wait_for_timeout(1000 * NEW_LINK_INTERVAL_S)
        page.click("button:has-text('Print a new link there')")
        page.wait_for_selector("text=A new link stands in the terminal")
        new_link = login_url(console)
        assert new_link != first_link
        page.goto(new_link)
        page.wait_for_selector("h1:has-text('Now')")
        page.goto(new_link)
        page.wait_for_selector("text=was used before")
        page.goto(first_link)
        page.wait_for_selector("h1:has-text('Now')")
