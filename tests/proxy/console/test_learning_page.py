"""The page Learning: results on held-out rows, breaks, costs, and the meaning of the words."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fakevllm.console.page_renderer import TEMPLATES
from fakevllm.console.sources.shared_evaluations import SharedEvaluations
from fakevllm.console.terms import TERMS
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.ledger.records import GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm_adapters.protocol.swarm import LogEntry
from tests.proxy.console.console_rig import open_console
from tests.proxy.console.test_pages import Elements, put
from tests.proxy.console.test_run_pages import evaluated
from tests.proxy.ledger.ledger_cases import group, trained
from tests.proxy.markup import MARKUP

HUGE = 1.7e308
LEGEND_PAGES = ("learning", "evaluations", "evaluation", "releases")


def of_run(step: int, run_id: str = "r", *, hook: str = "h") -> GroupRecord:
    one = group(f"{run_id}{step}", (0.0, 0.5), step=step, received_at=1000.0 + step)
    return replace(one, run_id=run_id, hook_hash=hook)


def made(seq: int, step: int, version: int, *names: str) -> LogEntry:
    metrics = {"step_seconds": 4.0, "seconds": 1.5}
    entry = trained(seq, *names, step=step)
    return entry.model_copy(update={"version": version, "metrics": metrics})


def measured(
    version: int | None, rewards: Sequence[float], *, run: str | None = "r", **facts: Any
) -> list[GroupRecord]:
    """Return the rows of an evaluation with one sample each."""
    rows = [evaluated(number, version, [reward], **facts) for number, reward in enumerate(rewards)]
    return [replace(row, run_id=run) for row in rows]


def section(html: str, title: str) -> str:
    """Return the text of the part of a page below a heading."""
    assert f"<h2>{title}</h2>" in html
    part = html.partition(f"<h2>{title}</h2>")[2].partition("<h2>")[0]
    return " ".join(re.sub(r"<[^>]+>", " ", part).split())


def marks(html: str) -> list[dict[str, float]]:
    found = re.search(r'data-marks="([^"]*)"', html)
    assert found is not None
    return json.loads(unescape(found[1]))


async def test_held_out_results_are_in_the_table_and_in_the_chart(
    path: Path, ledger: Ledger
) -> None:
    put(
        ledger,
        *(of_run(step) for step in (1, 2)),
        *measured(0, [0.0] * 8, eval_id="first", at=2000.0),
        *measured(0, [0.0] * 8, eval_id="gate-6", at=3000.0),
        *measured(6, [1.0] * 8, eval_id="gate-6", at=3001.0),
    )
    ledger.apply_log("r", [made(1, 1, 5, "r1"), made(2, 2, 6, "r2")])
    assert ledger.drain()
    async with open_console(path) as rig:
        html = await rig.get("/learning")
    text = section(html, "Held-out results")
    assert "version 6 2 8 1.000 (" in text and "+1.000 (" in text and "release gate" in text
    assert "version 0 before training 8 0.000 (0.000 to " in text
    assert 'href="/evaluations/gate-6"' in html and 'href="/evaluations/first"' in html
    # The marks are in the order in which they were measured: the chart shows the last of a step.
    assert [(mark["step"], mark["mean"]) for mark in marks(html)] == [(0, 0), (2, 1), (0, 0)]
    for mark in marks(html):
        assert mark["low"] <= mark["mean"] <= mark["high"]


async def test_without_held_out_results_the_page_names_the_command(
    path: Path, ledger: Ledger
) -> None:
    put(ledger, of_run(1))
    async with open_console(path) as rig:
        html = await rig.get("/learning")
    assert "fakevllm eval --dataset FILE" in section(html, "Held-out results")
    assert marks(html) == []


async def test_results_of_another_run_are_left_out(path: Path, ledger: Ledger) -> None:
    put(
        ledger,
        of_run(1, "old"),
        of_run(2, "new"),
        *measured(0, [0.25] * 4, run="old", eval_id="e-old"),
        *measured(0, [0.75] * 4, run="new", eval_id="e-new"),
        *measured(0, [0.5] * 4, run=None, eval_id="e-unknown"),
    )
    async with open_console(path) as rig:
        for run_id in ("old", "new"):
            html = await rig.get(f"/learning?run={run_id}")
            assert re.findall(r'href="/evaluations/([^"]+)"', html) == [f"e-{run_id}"]


async def test_rows_of_an_older_proxy_count_if_there_is_one_run(path: Path, ledger: Ledger) -> None:
    put(ledger, of_run(1), *measured(3, [0.5] * 4, run=None))
    async with open_console(path) as rig:
        html = await rig.get("/learning")
    # The step that made version 3 is unknown, so the chart has no place for it.
    assert "version 3 – 4 0.500 (" in section(html, "Held-out results")
    assert marks(html) == []


async def test_results_with_several_hooks_show_their_hooks(path: Path, ledger: Ledger) -> None:
    first, second = (
        [replace(row, hook_hash=hook) for row in measured(0, [0.5] * 2, eval_id=hook)]
        for hook in ("aaaaaaaaaa", "bbbbbbbbbb")
    )
    put(ledger, of_run(1), *first)
    async with open_console(path) as rig:
        assert "aaaaaaaa" not in section(await rig.get("/learning"), "Held-out results")
        put(ledger, *second)
        text = section(await rig.get("/learning"), "Held-out results")
    assert "aaaaaaaa" in text and "bbbbbbbb" in text and "only if their hooks are equal" in text


async def test_a_result_of_huge_rewards_has_no_mark(path: Path, ledger: Ledger) -> None:
    put(ledger, of_run(1), *measured(0, [HUGE, HUGE, -HUGE]))
    async with open_console(path) as rig:
        html = await rig.get("/learning")
    assert "version 0" in section(html, "Held-out results") and marks(html) == []


async def test_a_break_has_a_text_on_the_page_and_in_the_chart(path: Path, ledger: Ledger) -> None:
    put(ledger, of_run(1), of_run(2, hook="other"))
    async with open_console(path) as rig:
        html = await rig.get("/learning")
        curve = (await rig.browser.get("/learning/curve")).json()
    assert "<b>Break.</b> From step 2: the hooks changed." in html
    assert [point["changed"] for point in curve] == ["", "the hooks changed"]


async def test_tokens_and_time_are_shown_for_the_run_and_for_each_step(
    path: Path, ledger: Ledger
) -> None:
    single = replace(group("single", [None]), state="served")
    put(ledger, of_run(1), of_run(2), single, *measured(0, [0.5]))
    ledger.apply_log("r", [made(1, 1, 1, "r1"), made(2, 2, 2, "r2")])
    assert ledger.drain()
    async with open_console(path) as rig:
        html = await rig.get("/learning")
    text = section(html, "Tokens and time")
    assert "2.0 times as many tokens were sampled as the apps alone would have used" in text
    for row in (
        "that the apps got 6 9",
        "of the other siblings 6 6",
        "sampled for evaluations – 6",
        "sampled for each token that the apps got 2.000 1.667",
        "that were trained 12 12",
        "time of all steps 8.0 s –",
        "of it, training 3.0 s –",
    ):
        assert row in text, row
    assert re.search(r"2 1 0.250 \S+ \S+ 0 3 3 6 4.0 s", section(html, "Steps"))


async def test_without_measured_seconds_the_page_shows_tokens_alone(
    path: Path, ledger: Ledger
) -> None:
    put(ledger, of_run(1))
    async with open_console(path) as rig:
        html = await rig.get("/learning")
    text = section(html, "Tokens and time")
    assert "that the apps got 3 3" in text and "time of all steps" not in text
    assert "time" not in section(html, "Steps")


@pytest.mark.parametrize("text", MARKUP)
async def test_markup_in_an_evaluation_is_shown_as_text(
    text: str, path: Path, ledger: Ledger
) -> None:
    rows = measured(0, [0.5], run=text, eval_id=text)
    changed = [replace(row, hook_hash=text, model=text) for row in rows]
    put(ledger, replace(of_run(1), run_id=text), *changed)
    async with open_console(path) as rig:
        for headers in ({}, {"hx-request": "true"}):
            html = (await rig.browser.get("/learning", headers=headers)).text
            elements = Elements()
            elements.feed(html)
            assert elements.unexpected == []
            assert ">fakevllm eval</a>" in html


def test_all_pages_share_the_results_until_evaluated_rows_change(
    path: Path, ledger: Ledger
) -> None:
    put(ledger, *measured(0, [0.5] * 2))
    reader = ReadOnlyLedger(path)
    shared = SharedEvaluations(reader, RewardRange(0.0, 1.0))
    with reader.reading():
        first = shared.latest()
        put(ledger, of_run(1))
        assert shared.latest() is first
        put(ledger, *measured(1, [1.0] * 2, eval_id="e2", at=2000.0))
        assert [result.eval_id for result in shared.latest().results] == ["e2", "e1"]


def test_each_word_of_the_legends_has_a_meaning_and_a_page() -> None:
    listed: set[str] = set()
    for name in LEGEND_PAGES:
        template = (TEMPLATES / f"{name}.html").read_text()
        found = re.search(r"legend\(\[(.*)\]\)", template)
        assert found is not None, name
        words = re.findall(r'"([^"]+)"', found[1])
        assert words == sorted(set(words)), name
        listed.update(words)
    assert listed == TERMS.keys()


async def test_the_pages_explain_their_words(path: Path, ledger: Ledger) -> None:
    put(ledger, *measured(0, [0.5]))
    async with open_console(path) as rig:
        for url in ("/learning", "/evaluations", "/evaluations/e1", "/releases"):
            html = await rig.get(url)
            assert "<summary>What the words mean</summary>" in html
            assert "<dt>interval</dt>" in html
            # An update of the page must not close the list.
            live = (await rig.browser.get(url, headers={"hx-request": "true"})).text
            assert "What the words mean" not in live
