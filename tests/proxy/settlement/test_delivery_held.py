"""What is said of an answer before its group is sent: the group is sent with it, once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.store import Ledger
from fakevllm.sessions.types import Kind, Place
from fakevllm.settlement.delivery import Delivery
from fakevllm.swarm.link import SwarmLink
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EndGroupReply
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.odd_swarm import OddSwarm, until

POOLED = EndGroupReply(success=True, pooled=True, step=3, run_id="r")
KEY = "0a1b2c3d"
LONG_S = 1000.0


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


class Held:
    """A settling before an odd server."""

    def __init__(self, swarm: OddSwarm, ledger: Ledger, window_s: float) -> None:
        swarm.answers["/end_group"] = POOLED
        self.swarm = swarm
        self.link = SwarmLink(swarm.url, None, TrainJob(), ledger)
        self.one = Delivery(ledger, self.link, window_s)

    async def close(self) -> None:
        await self.one.close()
        await self.link.close()

    async def sent(self) -> list[float | None]:
        await until(lambda: self.swarm.calls["/end_group"] > 0)
        return self.swarm.bodies["/end_group"]["rewards"]


async def test_a_held_group_is_sent_with_what_was_said_and_at_once(ledger: Ledger) -> None:
    async with OddSwarm() as swarm:
        held = Held(swarm, ledger, LONG_S)
        held.one.answered("g1", "chatcmpl-1", KEY, None)
        held.one.settle(group("g1", [0.5, 1.0], served=1))
        await held.one.until_over("g1")
        assert await ledger.flush() and swarm.calls["/end_group"] == 0
        assert held.one.find("chatcmpl-1", KEY) == "g1"
        held.one.hear("g1")
        held.one.heard("g1", -2.0)
        assert await held.sent() == [0.5, -1.0]
        assert held.one.find("chatcmpl-1", KEY) is None
        await held.close()
    found = ledger.group("g1")
    assert found is not None
    assert [sibling.reward for sibling in found.siblings] == [0.5, 1.0]  # the hook's stay


async def test_a_group_is_not_sent_while_something_is_being_said(ledger: Ledger) -> None:
    async with OddSwarm() as swarm:
        held = Held(swarm, ledger, 0.0)
        held.one.answered("g1", "chatcmpl-1", KEY, None)
        held.one.hear("g1")
        held.one.settle(group("g1", [0.5, 1.0]))
        await held.one.until_over("g1")
        for _ in range(3):
            assert await ledger.flush()
        assert swarm.calls["/end_group"] == 0
        held.one.heard("g1", None)
        assert await held.sent() == [0.5, 1.0]
        await held.close()


async def test_the_next_turn_ends_the_wait(ledger: Ledger) -> None:
    async with OddSwarm() as swarm:
        held = Held(swarm, ledger, LONG_S)
        first = Place(session_id="s", parent_id=None, turn=1, kind=Kind.NEW)
        held.one.answered("g1", "chatcmpl-1", KEY, first)
        held.one.settle(group("g1"))
        await held.one.until_over("g1")
        held.one.moved_on(Place(session_id="s", parent_id="g1", turn=2, kind=Kind.CONTINUES))
        assert await held.sent() == [0.0, 1.0]
        await held.close()


async def test_a_window_that_ends_sends_the_group_as_it_is(ledger: Ledger) -> None:
    async with OddSwarm() as swarm:
        held = Held(swarm, ledger, 0.01)
        held.one.settle(group("g1"))
        assert await held.sent() == [0.0, 1.0]
        await held.close()


async def test_a_stop_leaves_held_groups_to_the_next_life_with_what_was_said(
    ledger: Ledger,
) -> None:
    async with OddSwarm() as swarm:
        held = Held(swarm, ledger, LONG_S)
        for name in ("g1", "g2"):
            held.one.settle(group(name, [0.5, 1.0]))
            await held.one.until_over(name)
        async with asyncio.timeout(5):
            await held.close()
        assert swarm.calls["/end_group"] == 0
        row = FeedbackRecord(group_id="g1", feedback_id="a", received_at=0.0, thumbs="up")
        ledger.feedback.record(row)
        ledger.feedback.set_outcome(row, FeedbackState.JOINED, value=1.0, amount=0.25)
        assert await ledger.flush()
        left = ledger.scored_groups()
        assert [(one.group_id, one.rewards) for one in left] == [
            ("g1", [0.75, 1.0]),
            ("g2", [0.5, 1.0]),
        ]
        after = Held(swarm, ledger, LONG_S)
        following = asyncio.create_task(after.link.run())
        after.one.resend(left)
        await until(lambda: swarm.calls["/end_group"] == 2)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await after.close()


async def test_a_group_that_is_never_sent_lets_go_of_who_waits_for_it(ledger: Ledger) -> None:
    async with OddSwarm() as swarm:
        held = Held(swarm, ledger, LONG_S)
        held.one.answered("g1", "chatcmpl-1", KEY, None)
        held.one.hear("g1")
        waiting = asyncio.create_task(held.one.until_over("g1"))
        await asyncio.sleep(0)
        assert not waiting.done()
        held.one.settle(group("g1", state="dropped"))
        async with asyncio.timeout(5):
            await waiting
        assert not held.one.takes("g1")
        await held.close()
