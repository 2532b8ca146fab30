"""The tokens of an answer: their colours, their texts, and why they are missing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fakevllm.console import token_panel
from fakevllm.console.page_renderer import STATIC
from fakevllm.console.sources import token_texts
from fakevllm.console.sources.token_texts import MAX_AGE_S, EngineTokenTexts
from fakevllm.console.token_panel import missing_tokens, token_classes
from fakevllm.ledger.forgotten_groups import Cause
from fakevllm.ledger.records import EVAL_KIND, GroupRecord
from fakevllm.ledger.redacted_records import REDACTED
from fakevllm.ledger.store import Ledger
from fakevllm.tokens.colours import BAD, GOOD, NUM_SHADES, SURPRISING, ColourBy
from fakevllm.tokens.html import MAX_OPACITY
from fakevllm.tokens.page import Token
from tests.proxy.console.console_rig import ABSENT_PROXY, ConsoleRig, open_console
from tests.proxy.console.test_pages import Elements
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.ledger.ledger_cases import trained as step_entry
from tests.proxy.markup import MARKUP
from tests.proxy.scripted_swarm import ROLLING, ScriptedSwarm
from tests.proxy.tokens.pages import call

TEXTS = {3: " It", 4: "\nis 8", 5: "<b>"}


def put(ledger: Ledger, record: GroupRecord, *calls: Any) -> None:
    """Record a group whose answers have these calls."""
    ledger.record(replace(record, state="scored"))
    if calls:
        ledger.settle(record.group_id, "pooled", None, 1, [[one] for one in calls], "r")
    assert ledger.drain()


def trained(ledger: Ledger, *advantages: float, group_id: str = "g1") -> None:
    entry = step_entry(1, group_id, siblings=range(len(advantages)), advantages=advantages)
    ledger.apply_log("r", [entry])
    assert ledger.drain()


def spans(html: str) -> list[tuple[str, str]]:
    """Return the classes and the text of each token."""
    found = re.findall(r'<span class="(t[ "][^>]*?)" title="[^"]*">([^<]*)</span>', html)
    return [(classes, unescape(text)) for classes, text in found]


@asynccontextmanager
async def open_with_engine(
    ledger: Path, texts: dict[int, str]
) -> AsyncGenerator[tuple[ConsoleRig, ScriptedSwarm]]:
    """Open a console whose server has an engine that decodes these tokens."""

    async def detokenize(body: Any) -> Any:
        return {"prompt": texts[body["tokens"][0]]}

    async with ScriptedSwarm() as swarm:
        swarm.functions["/detokenize"] = detokenize
        async with open_console(ledger, server_url=swarm.url) as rig:
            yield rig, swarm


def test_the_classes_of_a_token_show_its_advantage_its_surprise_and_the_loss_mask() -> None:
    assert token_classes(Token(1, True, -0.1, 1.0), 2.0) == "t good-5 odd-1"
    assert token_classes(Token(1, True, 0.0, -2.0), 2.0) == "t bad-8"
    assert token_classes(Token(1, True, -1.0, 0.0), 2.0) == "t odd-2"
    assert token_classes(Token(1, False, -50.0), 2.0) == "t odd-8 out"


def test_the_style_sheet_has_the_shades_of_the_token_page() -> None:
    css = (STATIC / "console.css").read_text()
    rule = re.compile(
        r'\.tokens:has\(\[value="(\w+)"\]:checked\) \.(\w+)-(\d) '
        r"\{ background: rgb\((\d+) (\d+) (\d+) / ([\d.]+)\); \}"
    )
    colours = {"good": (GOOD, "advantage"), "bad": (BAD, "advantage")}
    colours["odd"] = (SURPRISING, "logprob")
    found = rule.findall(css)
    assert len(found) == len(colours) * NUM_SHADES
    for by, name, number, red, green, blue, opacity in found:
        assert ((int(red), int(green), int(blue)), ColourBy(by)) == colours[name]
        assert float(opacity) == pytest.approx(MAX_OPACITY * int(number) / NUM_SHADES, abs=0.001)


async def test_the_tokens_have_their_texts_their_numbers_and_their_colours(
    path: Path, ledger: Ledger
) -> None:
    put(ledger, group("g/1"), call(), call((3, 4, 5), (-0.5, -6.0, -0.5)))
    trained(ledger, 2.0, -1.0, group_id="g/1")
    async with open_with_engine(path, TEXTS) as (rig, swarm):
        page = await rig.get("/groups/g%2F1")
        assert page.count('hx-get="/tokens/g%2F1?sibling=') == 2
        html = await rig.get("/tokens/g%2F1?sibling=1")
        assert spans(html) == [
            ("t bad-5 odd-1", " It"),
            ("t bad-5 odd-8", "⏎\nis 8"),
            ("t bad-5 odd-1", "<b>"),
        ]
        assert "id 4, logprob -6.0000, advantage -1.0000, in the loss" in html
        assert re.search(r'value="advantage" checked', html) and "green: made more likely" in html
        assert "prompt of 2 tokens" in html
        assert swarm.calls["/detokenize"] == 3
        assert spans(await rig.get("/tokens/g%2F1?sibling=0"))[0] == ("t good-8 odd-1", " It")
        assert swarm.calls["/detokenize"] == 3, "the texts are kept for the next answer"
        for part in ({}, {"hx-request": "true"}):
            reply = await rig.browser.get("/tokens/g%2F1?sibling=1", headers=part)
            assert ("<html" in reply.text) == (not part)
        for bad in ("2", "-1", "x", ""):
            reply = await rig.browser.get(f"/tokens/g%2F1?sibling={bad}")
            assert reply.status_code == 404
        assert (await rig.browser.get("/tokens/none?sibling=0")).status_code == 404


async def test_an_answer_that_was_not_trained_is_coloured_by_log_probability(
    path: Path, ledger: Ledger
) -> None:
    put(ledger, group("g1"), call(), call())
    async with open_with_engine(path, TEXTS) as (rig, _):
        html = await rig.get("/tokens/g1?sibling=0")
    assert re.search(r'value="logprob" checked', html)
    assert spans(html) == [("t odd-1 out", " It"), ("t out", "⏎\nis 8")]


@pytest.mark.parametrize("text", MARKUP)
async def test_markup_in_tokens_is_shown_as_text(text: str, path: Path, ledger: Ledger) -> None:
    put(ledger, group("g1"), call(untrainable=text), call())
    async with open_with_engine(path, {3: text, 4: text}) as (rig, _):
        for headers in ({}, {"hx-request": "true"}):
            html = (await rig.browser.get("/tokens/g1?sibling=0", headers=headers)).text
            elements = Elements()
            elements.feed(html)
            assert elements.unexpected == []
            assert [shown for _, shown in spans(html)] == [text, text]


async def test_without_an_engine_the_ids_are_shown_with_a_reason(
    path: Path, ledger: Ledger
) -> None:
    put(ledger, group("g1"), call(), call())
    async with open_console(path) as rig:
        html = await rig.get("/tokens/g1?sibling=0")
    assert [text for _, text in spans(html)] == ["[3] ", "[4] "]
    assert "Texts are missing" in html and ABSENT_PROXY in html
    async with open_with_engine(path, {}) as (rig, swarm):
        del swarm.functions["/detokenize"]
        html = await rig.get("/tokens/g1?sibling=0")
    assert [text for _, text in spans(html)] == ["[3] ", "[4] "]
    assert f"Texts are missing: no engine at {swarm.url}" in html


@pytest.mark.parametrize("run_id", ["another", ""])
async def test_an_engine_of_another_run_does_not_decode_the_tokens(
    run_id: str, path: Path, ledger: Ledger
) -> None:
    put(ledger, group("g1"), call(), call())
    async with open_with_engine(path, TEXTS) as (rig, swarm):
        swarm.answers["/get_engine_status"] = ROLLING.model_copy(update={"run_id": run_id})
        html = await rig.get("/tokens/g1?sibling=0")
        assert [text for _, text in spans(html)] == ["[3] ", "[4] "]
        assert "not known to belong to the present run" in html
        assert "<code>fakevllm tokens ID --model FOLDER</code>" in html
        assert swarm.calls["/detokenize"] == 0


async def test_the_tokens_of_a_group_without_a_run_are_not_decoded(
    path: Path, ledger: Ledger
) -> None:
    ledger.record(group("g1"))
    ledger.settle("g1", "pooled", None, 1, [[call()], [call()]], "")
    assert ledger.drain()
    async with open_with_engine(path, TEXTS) as (rig, swarm):
        swarm.answers["/get_engine_status"] = ROLLING.model_copy(update={"run_id": ""})
        assert "not known to belong" in await rig.get("/tokens/g1?sibling=0")


async def test_a_long_answer_is_cut_off_and_the_page_says_so(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_panel, "MAX_TOKENS", 3)
    put(ledger, group("g1"), call((3, 4) * 5, (-0.5,) * 10), call())
    async with open_console(path) as rig:
        html = await rig.get("/tokens/g1?sibling=0")
    assert len(spans(html)) == 3 and "7 more tokens are not shown here" in html


async def test_a_page_says_why_there_are_no_tokens(path: Path, ledger: Ledger) -> None:
    put(ledger, group("waits"))
    put(ledger, group("once", [1.0]))
    put(ledger, group("pruned"), call(), call())
    redacted = call((), None, untrainable=REDACTED)
    put(ledger, group("hidden"), redacted, redacted)
    trained(ledger, 1.0, -1.0, group_id="pruned")
    ledger.forgotten.forget(["pruned"], Cause.PRUNED, 1.0)
    assert ledger.drain()
    expected = {
        "waits": "arrive when the server has acknowledged the rewards",
        "once": "arrive when",
        "pruned": "no longer kept",
        "hidden": "redacted texts",
    }
    async with open_console(path) as rig:
        for group_id, words in expected.items():
            html = await rig.get(f"/tokens/{group_id}?sibling=0")
            assert words in html and spans(html) == [], group_id
            shown = await rig.get(f"/groups/{group_id}")
            assert (words in shown) == (group_id != "hidden")
            assert ('hx-get="/tokens/' in shown) == (group_id == "hidden")


def test_the_reason_for_missing_tokens_depends_on_the_group() -> None:
    once = replace(group("g", [1.0], state="served"))
    assert "sampled only once" in missing_tokens(once, None)
    assert "dropped before its end" in missing_tokens(group("g", state="dropped"), None)
    assert "fakevllm forget" in missing_tokens(once, Cause.FORGOTTEN)
    evaluated = replace(group("g", state="served"), kind=EVAL_KIND)
    assert "evaluations do not keep them" in missing_tokens(evaluated, None)


def test_texts_are_requested_again_after_a_minute_and_for_another_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[set[int]] = []

    def fetch(url: str, key: str | None, ids: set[int], max_s: float) -> dict[int, str]:
        requests.append(ids)
        return {id: str(id) for id in ids}

    monkeypatch.setattr(token_texts, "texts_from_engine", fetch)
    now = [0.0]
    texts = EngineTokenTexts("http://engine", None, lambda: now[0])
    assert texts.texts({1, 2}, "r") == ({1: "1", 2: "2"}, "")
    texts.texts({2, 3}, "r")
    assert requests == [{1, 2}, {3}]
    now[0] = MAX_AGE_S + 1
    texts.texts({2}, "r")
    assert requests[-1] == {2}
    texts.texts({2}, "another run")
    assert len(requests) == 4


async def test_a_slow_engine_does_not_hold_up_the_page(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def detokenize(body: Any) -> Any:
        (id,) = body["tokens"]
        if id >= 4:
            await asyncio.sleep(1.0)
        return {"prompt": f"text {id}"}

    monkeypatch.setattr(token_texts, "MAX_WAIT_S", 0.5)
    put(ledger, group("g1"), call(range(64), [-0.5] * 64), call())
    async with open_with_engine(path, {}) as (rig, swarm):
        swarm.functions["/detokenize"] = detokenize
        begin = time.monotonic()
        html = await rig.get("/tokens/g1?sibling=0")
        took_s = time.monotonic() - begin
    assert "is slow" in html and took_s < 4.0  # all texts would take 7.5 s
    assert [text for _, text in spans(html)][:5] == ["text 0", "text 1", "text 2", "text 3", "[4] "]
