"""The chat page in Chromium, driven by Playwright. `.ci/browser` installs both."""

from __future__ import annotations

import os
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.axe import axe_violations
from tests.e2e.npm_package import install_axe_core
from tests.e2e.stack import Stack, running_stack
from tests.examples.webchat_app import running_webchat

pytestmark = [pytest.mark.browser]

SIZES = {"desktop": (1280, 800), "phone": (390, 844)}
ANSWERED = ".assistant:not(.waiting) .tools"
SLOW = "[[slow 0.3]][[say one two three four five six seven eight nine ten]]"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@contextmanager
def page_at(url: str, size: tuple[int, int], scheme: str = "light") -> Generator[Any]:
    """Open a page and yield it. An error in the page's JavaScript fails the test."""
    driver: Any = import_module("playwright.sync_api")
    with driver.sync_playwright() as playwright:
        chromium = shutil.which("chromium") or os.environ["CHROMIUM"]
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        viewport = {"width": size[0], "height": size[1]}
        page: Any = browser.new_page(viewport=viewport, color_scheme=scheme)
        page.set_default_timeout(60_000)
        errors: list[str] = []

        def on_error(error: object) -> None:
            errors.append(str(error))

        page.on("pageerror", on_error)
        page.goto(url)
        yield page
        browser.close()
    assert not errors


def ask(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def wait_for_answers(page: Any, count: int) -> None:
    page.wait_for_function(f"document.querySelectorAll('{ANSWERED}').length == {count}")


def texts(page: Any, role: str) -> list[str]:
    return page.locator(f".{role} .text").all_text_contents()


def take_screenshot(page: Any, name: str) -> None:
    """Take a screenshot if FAKEVLLM_SCREENSHOTS names a folder."""
    if folder := os.environ.get("FAKEVLLM_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"webchat-{name}.png")


@pytest.mark.parametrize("size", SIZES)
def test_a_user_chats_rates_regenerates_and_comes_back(
    stack: Stack, tmp_path: Path, size: str
) -> None:
    with (
        running_webchat(stack.three.url, tmp_path) as url,
        page_at(url, SIZES[size]) as page,
    ):
        ask(page, "[[say Hello, wörld.]]")
        wait_for_answers(page, 1)
        ask(page, "[[say <b>no markup</b>]]")
        wait_for_answers(page, 2)
        assert texts(page, "assistant") == ["Hello, wörld.", "<b>no markup</b>"]
        page.get_by_label("Bad answer").last.click()
        page.wait_for_selector("[data-thumbs='-1'][aria-pressed=true]")
        take_screenshot(page, size)
        page.get_by_label("Regenerate this answer").click()
        page.wait_for_selector("[data-thumbs='-1'][aria-pressed=true]", state="detached")
        wait_for_answers(page, 2)
        page.reload()
        wait_for_answers(page, 2)
        assert texts(page, "user") == ["[[say Hello, wörld.]]", "[[say <b>no markup</b>]]"]
        assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")


def test_stop_keeps_the_received_text(stack: Stack, tmp_path: Path) -> None:
    with (
        running_webchat(stack.server.url, tmp_path) as url,
        page_at(url, SIZES["desktop"]) as page,
    ):
        ask(page, SLOW)
        page.wait_for_function("document.querySelector('.assistant .text')?.textContent.length > 0")
        page.click("#stop")
        wait_for_answers(page, 1)
        (kept,) = texts(page, "assistant")
        assert kept and "ten" not in kept
        assert page.is_visible("#send") and not page.is_visible("#stop")


@pytest.mark.parametrize("size", SIZES)
def test_each_chat_shows_its_own_messages(stack: Stack, tmp_path: Path, size: str) -> None:
    with (
        running_webchat(stack.three.url, tmp_path) as url,
        page_at(url, SIZES[size]) as page,
    ):

        def choose(label: str) -> None:
            if size == "phone":
                page.click("#menu")
            take_screenshot(page, f"{size}-chats")
            page.locator("#chats").get_by_role("button", name=label, exact=True).click()

        ask(page, "[[say one]]")
        wait_for_answers(page, 1)
        choose("New chat")
        page.wait_for_selector(".empty")
        ask(page, "[[say two]]")
        wait_for_answers(page, 1)
        assert texts(page, "assistant") == ["two"]
        choose("[[say one]]")
        page.wait_for_function("document.querySelector('.assistant .text').textContent == 'one'")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_core_finds_no_violations(
    stack: Stack, tmp_path: Path, size: str, scheme: str, pytestconfig: pytest.Config
) -> None:
    axe = install_axe_core(pytestconfig)
    with (
        running_webchat(stack.three.url, tmp_path) as url,
        page_at(url, SIZES[size], scheme) as page,
    ):
        page.wait_for_selector(".empty")
        assert axe_violations(page, axe) == []
        ask(page, "[[say Hello, wörld.]]")
        wait_for_answers(page, 1)
        page.get_by_label("Bad answer").click()
        page.wait_for_selector("[data-thumbs='-1'][aria-pressed=true]")
        take_screenshot(page, f"{size}-{scheme}")
        assert axe_violations(page, axe) == []
        if size == "phone":
            page.click("#menu")
            page.wait_for_function(
                "document.querySelector('#chats').getBoundingClientRect().x == 0"
            )
            assert axe_violations(page, axe) == []
