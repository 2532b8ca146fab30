"""Feedback that arrives before its group is sent is sent with the group, once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.store import Ledger
from fakevllm.sessions.types import Kind, Place
from fakevllm.settlement.reward_delivery import Delivery
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EndGroupReply
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.scripted_swarm import ScriptedSwarm, until

POOLED = EndGroupReply(success=True, pooled=True, step=3, run_id="r")
KEY = "0a1b2c3d"
LONG_S = 1000.0


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


class HeldDelivery:
    """A delivery that sends groups to a stub of the swarm server."""

    def __init__(self, swarm: ScriptedSwarm, ledger: Ledger, window_s: float) -> None:
        swarm.answers["/end_group"] = POOLED
        self.swarm = swarm
        self.link = SwarmLink(swarm.url, None, TrainJob(), ledger)
        self.delivery = Delivery(ledger, self.link, window_s)

    async def close(self) -> None:
        await self.delivery.close()
        await self.link.close()

    async def sent(self) -> list[float | None]:
        await until(lambda: self.swarm.calls["/end_group"] > 0)
        return self.swarm.bodies["/end_group"]["rewards"]


async def test_feedback_releases_a_held_group_and_is_added_to_its_reward(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        held = HeldDelivery(swarm, ledger, LONG_S)
        held.delivery.register_answer("g1", "chatcmpl-1", KEY, None)
        held.delivery.settle(group("g1", [0.5, 1.0], served=1))
        await held.delivery.wait_recorded("g1")
        assert await ledger.flush() and swarm.calls["/end_group"] == 0
        assert held.delivery.find("chatcmpl-1", KEY) == "g1"
        held.delivery.feedback_started("g1")
        held.delivery.feedback_finished("g1", -2.0)
        assert await held.sent() == [0.5, -1.0]
        assert held.delivery.find("chatcmpl-1", KEY) is None
        await held.close()
    found = ledger.group("g1")
    assert found is not None
    assert [sibling.reward for sibling in found.siblings] == [
        0.5,
        1.0,
    ]  # the ledger keeps the hook's rewards


async def test_a_group_is_not_sent_while_feedback_is_being_processed(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        held = HeldDelivery(swarm, ledger, 0.0)
        held.delivery.register_answer("g1", "chatcmpl-1", KEY, None)
        held.delivery.feedback_started("g1")
        held.delivery.settle(group("g1", [0.5, 1.0]))
        await held.delivery.wait_recorded("g1")
        for _ in range(3):
            assert await ledger.flush()
        assert swarm.calls["/end_group"] == 0
        held.delivery.feedback_finished("g1", None)
        assert await held.sent() == [0.5, 1.0]
        await held.close()


async def test_the_next_turn_of_the_session_releases_a_held_group(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        held = HeldDelivery(swarm, ledger, LONG_S)
        first = Place(session_id="s", parent_id=None, turn=1, kind=Kind.NEW)
        held.delivery.register_answer("g1", "chatcmpl-1", KEY, first)
        held.delivery.settle(group("g1"))
        await held.delivery.wait_recorded("g1")
        held.delivery.release_earlier_turns(
            Place(session_id="s", parent_id="g1", turn=2, kind=Kind.CONTINUES)
        )
        assert await held.sent() == [0.0, 1.0]
        await held.close()


async def test_a_group_without_feedback_is_sent_at_the_end_of_its_window(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        held = HeldDelivery(swarm, ledger, 0.01)
        held.delivery.settle(group("g1"))
        assert await held.sent() == [0.0, 1.0]
        await held.close()


async def test_held_groups_are_sent_with_their_feedback_after_a_restart(
    ledger: Ledger,
) -> None:
    async with ScriptedSwarm() as swarm:
        held = HeldDelivery(swarm, ledger, LONG_S)
        for name in ("g1", "g2"):
            held.delivery.settle(group(name, [0.5, 1.0]))
            await held.delivery.wait_recorded(name)
        async with asyncio.timeout(30):
            await held.close()
        assert swarm.calls["/end_group"] == 0
        row = FeedbackRecord(group_id="g1", feedback_id="a", received_at=0.0, thumbs="up")
        ledger.feedback.record(row)
        ledger.feedback.set_outcome(row, FeedbackState.JOINED, value=1.0, amount=0.25)
        assert await ledger.flush()
        left = ledger.scored_groups()
        assert [(scored.group_id, scored.rewards) for scored in left] == [
            ("g1", [0.75, 1.0]),
            ("g2", [0.5, 1.0]),
        ]
        after = HeldDelivery(swarm, ledger, LONG_S)
        following = asyncio.create_task(after.link.run())
        after.delivery.resend(left)
        await until(lambda: swarm.calls["/end_group"] == 2)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await after.close()


async def test_waiting_for_a_group_ends_when_it_is_dropped(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        held = HeldDelivery(swarm, ledger, LONG_S)
        held.delivery.register_answer("g1", "chatcmpl-1", KEY, None)
        held.delivery.feedback_started("g1")
        waiting = asyncio.create_task(held.delivery.wait_recorded("g1"))
        await asyncio.sleep(0)
        assert not waiting.done()
        held.delivery.settle(group("g1", state="dropped"))
        async with asyncio.timeout(30):
            await waiting
        assert not held.delivery.accepts_feedback("g1")
        await held.close()
