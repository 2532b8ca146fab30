"""The group executor in any order of events: one answer, one record, and no leftover task."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakevllm_adapters.formats.sse import DONE
from tests.proxy.groups.group_rig import ALIVE, Stage, answer_of, chunks_of, staged


@pytest.fixture(scope="module")
def loop() -> Generator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


RULES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries(
        {
            "quorum": st.one_of(st.none(), st.integers(1, 3)),
            "random_fraction": st.sampled_from([0.0, 0.5]),
            "on_disconnect": st.sampled_from(["cancel", "finish"]),
        }
    ),
    st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["lead", "greedy"]),
            "on_disconnect": st.sampled_from(["cancel", "finish"]),
        }
    ),
)
WORDS = [
    "answers",
    "answers",
    "answers",
    "tells its role",
    "begins",
    "breaks",
    "is cut",
    "fails",
    "is refused",
    "is too much",
    "is crowded",
    "is lost",
]
EVENTS = st.one_of(
    st.tuples(st.integers(0, 3), st.sampled_from(WORDS)),
    st.tuples(st.integers(0, 3), st.sampled_from(WORDS)),
    st.sampled_from(["score", "score", "score fails", "leave", "deadline", "stop", "cancel"]),
)


async def apply_event(stage: Stage, event: object) -> None:
    match event:
        case int(index), str(word) if index in stage.upstream.words:
            await stage.act(index, word)
        case "score" | "score fails" if stage.hook.waiting is not None:
            num = len(stage.hook.scored[-1])
            rewards = [float(index) for index in range(num)]
            await stage.score(*rewards, fails=event == "score fails")
        case "leave":
            await stage.leave()
        case "deadline":
            stage.run.pass_deadline()
            await stage.turn()
        case "stop":
            stage.run.stop()
            await stage.turn()
        case "cancel" if not stage.handler.done():
            stage.handler.cancel()
            await stage.turn()
        case _:
            pass


async def run_events(
    rules: dict[str, Any], streamed: bool, shadow: bool, shares: bool, events: list[object]
) -> None:
    async with staged(4, streamed=streamed, shadow=shadow, shares=shares, **rules) as stage:
        for event in events:
            await apply_event(stage, event)
        while not stage.records:
            running = sorted(stage.upstream.words)
            assert running or stage.hook.waiting is not None, "the group waits for no event"
            await apply_event(stage, "score")
            if running and running[0] in stage.upstream.words:
                await apply_event(stage, (running[0], "answers"))
        await stage.turn()
        assert stage.handler.done() and stage.hook.waiting is None
        assert sorted(stage.upstream.started) == sorted(stage.upstream.ended)
        siblings = [index for index in stage.upstream.started if index > 0]
        # If their shared call is refused, siblings are sampled once more, by calls of their own.
        assert all(siblings.count(index) <= (2 if shares else 1) for index in siblings)
    assert len(stage.records) == 1 and stage.sibling_limit.in_flight == 0
    starts = [message for message in stage.sent if message["type"] == "http.response.start"]
    is_there = stage.is_answered or not stage.has_left.is_set()
    assert len(starts) == (1 if is_there or stage.sent else 0)
    if is_there:
        assert stage.is_answered
        assert sum(not one.get("more_body", False) for one in stage.sent[1:]) == 1
    check_record(stage, streamed)


def check_record(stage: Stage, streamed: bool) -> None:
    """Check that the record matches the app's answer."""
    record = stage.record
    served = [sibling.index for sibling in record.siblings if sibling.served]
    assert served == ([] if record.served_index is None else [record.served_index])
    if record.served_index is not None:
        index = record.served_index
        whole = b"".join([*chunks_of(index), DONE]) if streamed else answer_of(index)
        assert stage.body.removeprefix(ALIVE) == whole
        assert record.status == 200 or (record.status == 499 and stage.has_left.is_set())
    rewards = [sibling.reward for sibling in record.siblings if sibling.reward is not None]
    if record.state in ("scored", "dropped") and record.reason != "proxy_stopped":
        assert (record.best_index is not None) == bool(rewards)
    if record.state == "scored":
        assert sum(sibling.reward is not None for sibling in record.siblings) >= 2
        assert [sibling.index for sibling in record.siblings] == list(range(4))


@settings(max_examples=150)
@given(
    rules=RULES,
    streamed=st.booleans(),
    shadow=st.booleans(),
    shares=st.booleans(),
    events=st.lists(EVENTS, max_size=14),
)
def test_every_order_of_events_has_one_answer_one_record_and_no_leftover_task(
    loop: asyncio.Runner,
    rules: dict[str, Any],
    streamed: bool,
    shadow: bool,
    shares: bool,
    events: list[object],
) -> None:
    loop.run(run_events(rules, streamed, shadow, shares, events))
