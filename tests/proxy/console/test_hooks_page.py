"""The page Hooks in front of a real proxy: the code, the dry run, and the reload."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from fakevllm.config.hook_reload import ReloadSection
from fakevllm.config.model import load
from fakevllm.console.hook_dry_run import DryRunSettings
from fakevllm.ledger.store import Ledger
from fakevllm.web.app import create_app
from fakevllm.web.proxy_components import ProxyComponents
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.fuzz.in_process_stack import listening
from tests.proxy.console.console_rig import ConsoleRig, open_console
from tests.proxy.console.test_pages import MARKUP, Elements
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.settlement.feedback_rig import open_feedback_proxy

ON_FEEDBACK = "def on_feedback(feedback):\n    return 1.0\n"
BY_NUMBER = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(answer["content"].split()[-1]) * 0.5 for answer in all_answers]
"""
FAILING = """
def on_compute_relative_reward(valid_results, all_answers):
    return [answer["no_such_key"] for answer in all_answers]
"""
SLOW = """
import time
def on_compute_relative_reward(valid_results, all_answers):
    time.sleep(60)
"""
TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Rig:
    proxy: ProxyComponents
    console: ConsoleRig
    hooks: Path

    async def reload(self, **fields: str) -> httpx.Response:
        html = await self.console.get("/hooks")
        digest = re.search(r'name="digest" value="(\w+)"', html)
        data = {
            "form_token": await self.console.form_token("/hooks"),
            "digest": "" if digest is None else digest[1],
            "confirmed": "yes",
            **fields,
        }
        return await self.console.browser.post("/hooks/reload", data=data)


@asynccontextmanager
async def open_rig(folder: Path) -> AsyncGenerator[Rig]:
    async with (
        open_feedback_proxy(folder, hooks=ON_FEEDBACK) as (proxy, _, _),
        listening(create_app(proxy)) as url,
        open_console(
            folder / "ledger.sqlite", proxy_url=url, hooks=DryRunSettings(folder / "hooks")
        ) as console,
    ):
        yield Rig(proxy, console, folder / "hooks")


async def dry_run(console: ConsoleRig) -> str:
    """Start a dry run, wait for its end, and return its page."""
    token = await console.form_token("/hooks")
    reply = await console.browser.post("/hooks/dry-run", data={"form_token": token})
    assert reply.headers["location"] == "/hooks/dry-run"
    async with asyncio.timeout(TIMEOUT_S):
        while "every 1s" in (html := await console.get("/hooks/dry-run")):
            await asyncio.sleep(0.05)
    return html


def fill(path: Path, num: int = 3) -> None:
    ledger = Ledger.open(path)
    for number in range(num):
        ledger.record(replace(group(f"g{number}"), question=f"question {number}"))
    ledger.close()


async def test_the_code_is_shown_and_whether_the_proxy_uses_it(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        html = await rig.console.get("/hooks")
        assert "The proxy uses these files" in html
        assert "def on_compute_relative_reward" in html and "def on_feedback" in html
        write_hooks(rig.hooks, BY_NUMBER)
        html = await rig.console.get("/hooks")
        assert "The files on disk differ from the hooks that the proxy uses" in html
        assert ".split()[-1]" in html
        part = await rig.console.browser.get("/hooks?shown=old", headers={"hx-request": "true"})
        assert "have changed since this page was loaded" in part.text
        assert "def on_compute" not in part.text


async def test_the_console_lets_the_proxy_load_what_lies_on_disk(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        assert rig.proxy.hooks is not None
        rig.proxy.ledger.record(group("g1"))
        assert rig.proxy.ledger.drain()
        old = rig.proxy.hooks.versions.info.content_hash
        reply = await rig.reload()
        assert reply.status_code == 200 and "The hook files did not change" in reply.text
        write_hooks(rig.hooks, BY_NUMBER)
        reply = await rig.reload()
        assert reply.status_code == 200 and "took over from" in reply.text
        assert "The proxy uses these files" in reply.text
        assert rig.proxy.hooks.versions.info.content_hash != old


async def test_a_refused_reload_is_shown_as_a_sentence(tmp_path: Path) -> None:
    async with open_rig(tmp_path) as rig:
        assert rig.proxy.hooks is not None
        rig.proxy.ledger.record(group("g1"))
        assert rig.proxy.ledger.drain()
        old = rig.proxy.hooks.versions.info.content_hash
        for code, words in ((FAILING, "no_such_key"), ("def broken(:\n", "syntax")):
            write_hooks(rig.hooks, code)
            reply = await rig.reload()
            assert reply.status_code == 409 and "were not taken over" in reply.text
            assert words in reply.text and "Traceback" not in reply.text
            assert rig.proxy.hooks.versions.info.content_hash == old


async def test_a_reload_needs_a_token_a_confirmation_and_the_files_that_were_shown(
    tmp_path: Path,
) -> None:
    async with open_rig(tmp_path) as rig:
        assert rig.proxy.hooks is not None
        old = rig.proxy.hooks.versions.info.content_hash
        write_hooks(rig.hooks, BY_NUMBER)
        for fields, status in (
            ({"form_token": "0"}, 403),
            ({"confirmed": ""}, 400),
            ({"digest": old}, 409),
        ):
            assert (await rig.reload(**fields)).status_code == status
        token = {"form_token": "0"}
        reply = await rig.console.browser.post("/hooks/dry-run", data=token)
        assert reply.status_code == 403
        assert rig.proxy.hooks.versions.info.content_hash == old
        assert "There was no dry run" in await rig.console.get("/hooks/dry-run")


async def test_no_form_of_the_page_accepts_code_or_a_path(tmp_path: Path) -> None:
    marker = tmp_path / "was_run"
    code = f"open({str(marker)!r}, 'w')\n{PREFER_YES}"
    theirs = write_hooks(tmp_path / "theirs", code)
    async with open_rig(tmp_path) as rig:
        before = {file: file.read_bytes() for file in rig.hooks.iterdir() if file.is_file()}
        fields = {"code": code, "path": str(theirs), "hooks": str(theirs)}
        assert (await rig.reload(**fields)).status_code == 200
        token = await rig.console.form_token("/hooks")
        for url in ("/hooks/dry-run", "/hooks/reload", "/hooks"):
            data = {"form_token": token, "confirmed": "yes", **fields}
            await rig.console.browser.post(url, data=data, params=fields)
            await rig.console.browser.get(url, params=fields)
        await dry_run(rig.console)
        assert {file: file.read_bytes() for file in before} == before
    assert not marker.exists()


async def test_a_dry_run_shows_old_and_new_rewards_and_stores_nothing(path: Path) -> None:
    fill(path)
    hooks = write_hooks(path.parent / "hooks", BY_NUMBER)
    before = path.read_bytes()
    async with open_console(path, hooks=DryRunSettings(hooks)) as console:
        html = await dry_run(console)
        assert "The proxy would take these hooks over" in html
        assert "3 groups were tried" in html and "question 2" in html
        assert '<span class="reward">1.000</span>' in html
        assert '<mark class="reward">0.500</mark>' in html
        assert "The mean reward was 0.500, and is 0.250 with the files on disk." in html
        assert "correlation of old and new rewards: 1.00" in html
        assert 'href="/hooks/dry-run"' in await console.get("/hooks")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (FAILING, "they failed for 1 of"),
        ("def broken(:\n", "fix the syntax of this line"),
        ("x = 1", "no function `on_compute_relative_reward`"),
    ],
)
async def test_a_dry_run_says_why_the_proxy_would_refuse(code: str, words: str, path: Path) -> None:
    fill(path)
    hooks = write_hooks(path.parent / "hooks", code)
    async with open_console(path, hooks=DryRunSettings(hooks)) as console:
        html = await dry_run(console)
    assert "The proxy would not take these hooks over" in html and words in html
    assert "Traceback" not in html


async def test_a_dry_run_ends_after_its_time(path: Path) -> None:
    fill(path)
    hooks = write_hooks(path.parent / "hooks", SLOW)
    # The process of the hooks must start within this time, also on a busy machine.
    settings = DryRunSettings(hooks, limits=ReloadSection(max_s=8.0))
    async with open_console(path, hooks=settings) as console:
        html = await dry_run(console)
    assert "0 of 3 groups were tried within 8 s (limit hooks.reload.max_s)" in html


async def test_a_dry_run_without_a_ledger_is_explained(path: Path) -> None:
    hooks = write_hooks(path.parent / "hooks", BY_NUMBER)
    async with open_console(path, hooks=DryRunSettings(hooks)) as console:
        assert "There is no ledger" in await dry_run(console)


async def test_without_known_hooks_the_page_says_how_to_name_them(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with open_console(ledger) as console:
        html = await console.get("/hooks")
        assert "start it with --hooks FOLDER" in html and "The proxy does not answer" in html
        assert "<button>Reload" not in html
    async with open_console(ledger, hooks=DryRunSettings(tmp_path / "none")) as console:
        assert "no such file or folder" in await console.get("/hooks")


@pytest.mark.parametrize("text", MARKUP)
async def test_markup_in_hook_code_and_its_errors_is_shown_as_text(text: str, path: Path) -> None:
    ledger = Ledger.open(path)
    ledger.record(replace(group("g"), question=text))
    ledger.close()
    safe = text.replace("\x00", "")
    code = (
        "def on_compute_relative_reward(valid_results, all_answers):\n"
        f"    raise ValueError({safe!r})  # {safe}\n"
    )
    hooks = write_hooks(path.parent / "hooks", code.replace("\u2028", ""))
    async with open_console(path, hooks=DryRunSettings(hooks)) as console:
        for html in (await console.get("/hooks"), await dry_run(console)):
            elements = Elements()
            elements.feed(html)
            assert elements.unexpected == []
        assert "hook_raised" in html


def test_the_settings_are_those_of_the_proxy(tmp_path: Path) -> None:
    assert DryRunSettings.of(load(None, {})) is None
    flags = {"hooks": {"path": tmp_path, "timeout_s": 3, "reload": {"groups": 0, "max_s": 7}}}
    settings = DryRunSettings.of(load(None, flags))
    assert settings is not None and (settings.hooks, settings.timeout_s) == (tmp_path, 3)
    assert (settings.trial_limits.groups, settings.trial_limits.max_s) == (50, 7)
