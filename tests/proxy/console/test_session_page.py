"""The page of a session: its tree, and sessions with many turns."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.ledger.records import FeedbackRecord
from fakevllm.ledger.store import Ledger
from tests.proxy.console.console_rig import open_console
from tests.proxy.console.test_pages import links, put
from tests.proxy.ledger.test_session_reads import placed


async def test_a_session_is_shown_as_a_tree_with_its_live_branch(
    path: Path, ledger: Ledger
) -> None:
    put(
        ledger,
        placed("a", kind="new", at=1.0, question="first", rewards=(0.25, 1.0)),
        placed("t", kind="side", at=2.0, question="a title"),
        placed("b", parent_id="a", turn=2, at=3.0, question="second"),
        placed("c", parent_id="b", turn=3, at=4.0, question="third"),
        placed("r", parent_id="a", turn=2, at=5.0, kind="edits", question="reworded"),
        placed("u", parent_id="r", turn=2, at=6.0, question="reworded"),
        placed("agent", "s2", kind="sub_agent", at=7.0, parent_id="r", parent_session_id="s1"),
    )
    contents: dict[str, dict[str, Any]] = {
        "f1": {"thumbs": "down", "reason": "replaced"},
        "f2": {"thumbs": "up", "edited": "better"},
        "f3": {"kind": "next_message", "score": 0.5},
    }
    for feedback_id, values in contents.items():
        ledger.feedback.record(
            FeedbackRecord(group_id="c", feedback_id=feedback_id, received_at=8.0, **values)
        )
    assert ledger.drain()
    async with open_console(path) as rig:
        html = await rig.get("/sessions/s1")
        assert links(html) == ["a", "t", "b", "c", "r", "u"]
        items = html[html.index('<div class="session">') :]
        # The request after `b` is in a list of its own, and the live branch goes on.
        nested = items[items.index('href="/groups/b"') : items.index('href="/groups/r"')]
        assert nested.count("<ul>") == nested.count("</ul>") == 1
        assert items.count("live branch") == 3
        assert "side call" in items and "edited message" in items and "a tool’s result" in items
        assert "reward 0.250" in items
        assert nested.count("thumbs up, corrected") == items.count("thumbs") == 1
        assert items.index('href="/groups/r"') < items.index('href="/sessions/s2"')
        assert re.search(r'<li id="newest"><span class="turn"></span><a href="/groups/u"', items)
        assert "3 turns, 6 requests" in html and "The conversation has branches" in html
        assert 'href="/sessions/s1"' in await rig.get("/sessions/s2")


def test_of_much_feedback_the_latest_is_read_oldest_first(path: Path, ledger: Ledger) -> None:
    put(ledger, placed("a", kind="new"))
    for number in range(4):
        record = FeedbackRecord(
            group_id="a", feedback_id=f"f{number}", received_at=10.0 - number, score=float(number)
        )
        ledger.feedback.record(record)
    assert ledger.drain()
    reads = ReadOnlyLedger(path)
    with reads.reading():
        marks = reads.feedback.marks_of_session("s1", 2)
    assert [mark.score for mark in marks] == [1.0, 0.0]


async def test_a_session_without_branches_mentions_none(path: Path, ledger: Ledger) -> None:
    put(
        ledger,
        placed("a", kind="new"),
        placed("t", kind="side", at=1001.0),
        placed("b", parent_id="a", turn=2, at=1002.0),
    )
    async with open_console(path) as rig:
        html = await rig.get("/sessions/s1")
    assert "branch" not in html and html.count("<ul>") == 1


async def test_a_thousand_turns_are_one_flat_list(path: Path, ledger: Ledger) -> None:
    put(
        ledger,
        *(
            placed(f"g{n}", parent_id=f"g{n - 1}" if n else None, turn=n + 1, at=1000.0 + n)
            for n in range(1000)
        ),
    )
    async with open_console(path) as rig:
        html = await rig.get("/sessions/s1")
    assert links(html) == [f"g{n}" for n in range(1000)] and html.count("<ul>") == 1
    assert 'data-interval-s="20"' in html


async def test_only_the_latest_requests_of_a_very_long_session_are_shown(
    path: Path, ledger: Ledger
) -> None:
    put(
        ledger,
        *(
            placed(f"g{n}", parent_id=f"g{n - 1}" if n else None, turn=n + 1, at=1000.0 + n)
            for n in range(2005)
        ),
    )
    async with open_console(path) as rig:
        html = await rig.get("/sessions/s1")
    assert links(html) == [f"g{n}" for n in range(5, 2005)] and "Search all groups" in html
