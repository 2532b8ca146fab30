"""`fakevllm check-hook` shows the results of the user's hooks, or where they failed."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from fakevllm.errors import HookError
from fakevllm.hooks.check import CheckReport, check, render
from fakevllm.hooks.recorded_group import RecordedGroup, made_up_group
from fakevllm.hooks.spec import Task

SCORES = """
def on_user_submit_new_requests(request_id, task):
    return [{}, {"temperature": 1.2}]
def on_compute_relative_reward(valid_results, all_answers, question):
    all_answers[0]["note"] = "[bold]note"
    return [0.5, 0, None, 1]
"""


def rendered(report: CheckReport) -> str:
    console = Console(width=200, file=io.StringIO())
    with console.capture() as captured:
        console.print(render(report))
    return captured.get()


async def check_text(tmp_path: Path, text: str, group: RecordedGroup | None = None) -> CheckReport:
    (tmp_path / "mine.py").write_text(text)
    return await check(tmp_path / "mine.py", group)


async def test_the_table_has_rewards_ranks_and_annotations(tmp_path: Path) -> None:
    report = await check_text(tmp_path, SCORES)
    text = rendered(report)
    assert report.ok
    assert report.info.content_hash in text
    assert '{"note":"[bold]note"}' in text
    assert 'calculator({"expression": "6*7"})' in text
    assert '2 siblings, [{},{"temperature":1.2}]' in text
    lead = next(line for line in text.splitlines() if "6 times 7 is 42" in line)
    assert [cell.strip() for cell in lead.split("│")][4:6] == ["0.5", "2"]


async def test_a_hook_that_raises_is_shown_with_its_line(tmp_path: Path) -> None:
    report = await check_text(
        tmp_path, "def on_compute_relative_reward(v, a, q):\n    return [float(a[1]['content'])]\n"
    )
    text = rendered(report)
    assert not report.ok
    assert "hook_raised: ValueError: could not convert string to float: '' (mine.py:2)" in text
    assert "not defined, N stays" in text


async def test_a_failing_submit_hook_is_not_ok(tmp_path: Path) -> None:
    report = await check_text(tmp_path, SCORES.replace("[{}, ", "[{'n': 2}, "))
    assert not report.ok
    assert "item 0 must be {}" in rendered(report)


async def test_equal_rewards_are_reported_as_no_signal(tmp_path: Path) -> None:
    report = await check_text(
        tmp_path, "def on_compute_relative_reward(v, a):\n    return [1 for _ in a]\n"
    )
    assert "no signal" in rendered(report)


async def test_missing_rewards_are_reported_differently_from_equal_ones(tmp_path: Path) -> None:
    report = await check_text(
        tmp_path, "def on_compute_relative_reward(v, a):\n    return [1] + [None] * (len(a) - 1)\n"
    )
    text = " ".join(rendered(report).split())
    assert "fewer than two rewards are numbers" in text and "all equal" not in text


async def test_a_recorded_group_replaces_the_made_up_one(tmp_path: Path) -> None:
    answers = [{"role": "assistant", "content": "x" * 500, "finish_reason": "stop"}]
    group = RecordedGroup("g", Task(), "the question", answers)
    report = await check_text(
        tmp_path, "def on_compute_relative_reward(v, a):\n    return [1]\n", group
    )
    assert "the question" in rendered(report)
    assert "…" in rendered(report)


async def test_hooks_that_cannot_be_loaded_raise_an_error(tmp_path: Path) -> None:
    with pytest.raises(HookError, match=r"mine\.py:1"):
        await check_text(tmp_path, "raise ValueError('bad')\n")


def test_the_made_up_group_has_all_kinds_of_answers() -> None:
    group = made_up_group()
    finishes = [sibling.finish_reason for sibling in group.siblings()]
    assert finishes == ["stop", "stop", "tool_calls", "length"]
    assert group.answers[1]["content"] == ""
    assert group.task.metadata == {"answer": "42"}
