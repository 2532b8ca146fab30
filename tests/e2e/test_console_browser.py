"""The console in Chromium, driven by Playwright. `.ci/browser` installs both.

The environment variable FAKEVLLM_SCREENSHOTS names a folder for screenshots of all pages, and for
the pictures in the docs.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm.config.key_file import KeyFile
from fakevllm.console.access.login_link import NEW_LINK_INTERVAL_S
from fakevllm.tokens.colours import ColourBy
from fakevllm.tokens.html import render_html
from fakevllm_adapters.protocol.keys import named_key
from tests.e2e.axe import axe_violations
from tests.e2e.console_process import login_url, start_console, start_console_of_run
from tests.e2e.ledgers import rows, rows_of_file, wait_for_groups
from tests.e2e.npm_package import install_axe_core
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Process, Processes, free_port
from tests.e2e.stack import VALID, Stack, post
from tests.proxy.tokens import pages as token_pages

pytestmark = [pytest.mark.browser]

DEMO_STEPS = 150
DEMO_TIMEOUT_S = 600.0
DIFFERENT_ANSWERS = """
    SELECT one.group_id FROM siblings AS one JOIN siblings AS other USING (group_id)
    JOIN groups USING (group_id)
    WHERE one."index" = 0 AND other."index" = 1 AND one.served AND state = 'trained'
        AND one.text != other.text AND one.reward != other.reward
    ORDER BY received_at DESC LIMIT 1
"""
"""Query for a trained group whose first answer was served, and whose second has another reward."""
FIRST_GROUP = "SELECT group_id, session_id FROM groups ORDER BY received_at LIMIT 1"
SIZES = {"desktop": (1280, 800), "phone": (375, 812)}
PAGES = {
    "now": "/",
    "training": "/training",
    "learning": "/learning",
    "groups": "/groups",
    "sessions": "/sessions",
    "feedback": "/feedback",
    "hooks": "/hooks",
    "evaluations": "/evaluations",
    "releases": "/releases",
    "decision": "/releases/decision?version=3",
    "hold": "/releases/hold",
    "configuration": "/configuration?all=yes",
}


@pytest.fixture(scope="module")
def console(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    bodies = [
        {**VALID, "messages": [{"role": "user", "content": f"yes or no? {n}"}]} for n in range(6)
    ]
    replies = [post(stack.three, body).json() for body in bodies]
    wait_for_groups(stack.three, len(bodies))
    feedback = {"id": replies[0]["id"], "thumbs": "down", "comment": "wrong", "edited": "yes"}
    reply = httpx.post(f"{stack.three.url}/v1/feedback", json=feedback, timeout=20)
    assert reply.status_code == 200, reply.text
    with Processes(tmp_path_factory.mktemp("console")) as processes:
        yield start_console(processes, stack.three, "--swarm", stack.server.url)


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


def open_page(page: Any, url: str) -> None:
    """Show a page of the console, and wait for its heading and its chart, if it has one."""
    page.goto(url)
    page.wait_for_selector("main h1")
    if page.query_selector(".chart"):
        page.wait_for_selector(".chart canvas")


@pytest.fixture(scope="module")
def cookies(console: Process) -> list[Any]:
    """The cookies of a browser that has opened the printed link."""
    with browser_context() as context:
        page = watched_page(context, problems := [])
        page.goto(login_url(console))
        page.wait_for_selector("h1:has-text('Now')")
        assert problems == []
        return context.cookies()


BOTH_SIZES = pytest.mark.parametrize("size", SIZES)
BOTH_SCHEMES = pytest.mark.parametrize("scheme", ["light", "dark"])


def pages_with_deep_links(stack: Stack) -> dict[str, str]:
    """Return the paths of all pages, also of one group and of one session."""
    row = rows(stack.three, FIRST_GROUP)[0]
    deep = {"group": f"/groups/{row['group_id']}", "session": f"/sessions/{row['session_id']}"}
    return PAGES | deep


@BOTH_SCHEMES
@BOTH_SIZES
def test_each_page_fits_its_window_and_has_no_errors(
    size: str, scheme: str, console: Process, cookies: list[Any], stack: Stack, tmp_path: Path
) -> None:
    width, height = SIZES[size]
    folder = Path(os.environ.get("FAKEVLLM_SCREENSHOTS", tmp_path))
    viewport = {"width": width, "height": height}
    with browser_context(viewport=viewport, color_scheme=scheme) as context:
        context.add_cookies(cookies)
        problems: list[str] = []
        page = watched_page(context, problems)
        for name, path in pages_with_deep_links(stack).items():
            open_page(page, console.url + path)
            page.screenshot(path=folder / f"{name}-{size}-{scheme}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert problems == []


@BOTH_SCHEMES
@BOTH_SIZES
def test_axe_core_finds_no_violations_on_any_page(
    size: str,
    scheme: str,
    console: Process,
    cookies: list[Any],
    stack: Stack,
    pytestconfig: pytest.Config,
) -> None:
    axe = install_axe_core(pytestconfig)
    width, height = SIZES[size]
    viewport = {"width": width, "height": height}
    with browser_context(viewport=viewport, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(f"{console.url}/login")
        page.wait_for_selector("main h1")
        violations = {"login": axe_violations(page, axe)}
        context.add_cookies(cookies)
        missing = {"a group that is missing": "/groups/missing"}
        for name, path in (pages_with_deep_links(stack) | missing).items():
            open_page(page, console.url + path)
            page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
            violations[name] = axe_violations(page, axe)
            assert name != "group" or page.is_visible("h2:has-text('Feedback')")
    assert {name: found for name, found in violations.items() if found} == {}


@BOTH_SCHEMES
@BOTH_SIZES
def test_the_token_page_fits_its_window_and_axe_core_finds_no_violations(
    size: str, scheme: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    width, height = SIZES[size]
    html = tmp_path / "tokens.html"
    tokens = token_pages.page(0.5, -0.25, ids=(3, 4, 5) * 20, logprobs=(-0.5, 0.0, -6.0) * 20)
    html.write_text(render_html(tokens, token_pages.TEXTS, ColourBy.ADVANTAGE))
    folder = Path(os.environ.get("FAKEVLLM_SCREENSHOTS", tmp_path))
    viewport = {"width": width, "height": height}
    with browser_context(viewport=viewport, color_scheme=scheme) as context:
        page = context.new_page()
        page.goto(html.as_uri())
        page.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
        page.screenshot(path=folder / f"tokens-{size}-{scheme}.png")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        axe = install_axe_core(pytestconfig)
        for choice in ColourBy:
            page.check(f"#{choice}")
            assert axe_violations(page, axe) == [], choice


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


@pytest.mark.skipif(
    "FAKEVLLM_SCREENSHOTS" not in os.environ,
    reason="the pictures of the docs need minutes; FAKEVLLM_SCREENSHOTS names their folder",
)
@pytest.mark.timeout(900)
def test_the_pictures_of_the_docs_show_a_run_of_the_demo(
    processes: Processes, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    demo = ["-m", "fakevllm", "demo", "--steps", str(DEMO_STEPS), "--run-dir", "demo"]
    result = PRELOADED_PYTHON.run(demo, tmp_path, DEMO_TIMEOUT_S)
    assert result.returncode == 0, result.stdout + result.stderr
    absent_proxy = f"http://127.0.0.1:{free_port()}"
    console = start_console_of_run(processes, tmp_path / "demo", absent_proxy)
    folder = Path(os.environ["FAKEVLLM_SCREENSHOTS"])
    with browser_context(viewport={"width": 1000, "height": 706}) as context:
        page = context.new_page()
        page.goto(login_url(console))
        page.wait_for_selector("h1:has-text('Now')")
        open_page(page, f"{console.url}/learning")
        page.wait_for_timeout(1000)  # the chart is drawn by then
        page.screenshot(path=folder / "console-learning.png")
        cookies = context.cookies()
    width, height = SIZES["phone"]
    (group,) = rows_of_file(tmp_path / "demo" / "ledger.sqlite", DIFFERENT_ANSWERS)
    phone = {"width": width, "height": height}
    with browser_context(viewport=phone, color_scheme="dark") as context:
        context.add_cookies(cookies)
        page = context.new_page()
        open_page(page, f"{console.url}/groups/{group['group_id']}")
        page.screenshot(path=folder / "console-group-phone.png")
