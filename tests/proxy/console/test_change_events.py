"""The events that let open pages load their changing part again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from fakevllm.console.change_events import CLOCK_INTERVALS, LEDGER_EVENT, ChangeEvents
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.ledger.store import Ledger
from tests.proxy.ledger.ledger_cases import group

INTERVAL_S = 0.02


async def next_event(stream: AsyncIterator[str]) -> str:
    return await asyncio.wait_for(anext(stream), 10.0)


async def test_an_event_follows_each_change_of_the_ledger_and_a_clock(
    path: Path, ledger: Ledger
) -> None:
    events = ChangeEvents(ReadOnlyLedger(path).state_of_files, INTERVAL_S)
    stream = events.stream(lambda: True)
    assert (await next_event(stream)).startswith("retry:")
    assert "event: ledger" in await next_event(stream)
    seen: list[str] = []
    for number in range(3):
        reading = asyncio.ensure_future(next_event(stream))
        await asyncio.sleep(INTERVAL_S)
        ledger.record(group(f"g{number}"))
        seen.append(await reading)
        while "ledger" not in seen[-1]:
            seen.append(await next_event(stream))
    assert sum("event: ledger" in event for event in seen) == 3
    for _ in range(2):
        assert "event: clock" in await next_event(stream)
    assert CLOCK_INTERVALS > 1
    await stream.aclose()


async def test_a_stream_begins_with_an_event_for_changes_since_the_page_was_made() -> None:
    stream = ChangeEvents(lambda: 0, INTERVAL_S).stream(lambda: True)
    assert [(await next_event(stream)).partition(":")[0], await next_event(stream)] == [
        "retry",
        LEDGER_EVENT,
    ]
    await stream.aclose()


async def test_a_stream_ends_with_the_login_and_with_the_server() -> None:
    is_logged_in = True
    events = ChangeEvents(lambda: 0, INTERVAL_S)
    first, second = events.stream(lambda: is_logged_in), events.stream(lambda: True)
    for stream in (first, second):
        for _ in range(2):
            await next_event(stream)
    is_logged_in = False
    assert [event async for event in first] == []
    events.stop()
    assert [event async for event in second if "ledger" in event] == []
