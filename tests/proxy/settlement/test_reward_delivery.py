"""Every scored group is sent, by this proxy process or the next, or is lost with a reason."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import orjson
import pytest

from fakevllm.admission.held_out import HeldOutRows
from fakevllm.ledger.store import Ledger
from fakevllm.settlement import reward_delivery as delivery_module
from fakevllm.settlement.held_out_groups import HeldOutGroups
from fakevllm.settlement.reward_delivery import Delivery
from fakevllm.swarm import server_client
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EndGroupReply, SuccessReply, Task
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.scripted_swarm import ScriptedSwarm, until

T = TypeVar("T")
POOLED = EndGroupReply(success=True, pooled=True, step=3)
UNKNOWN = EndGroupReply(success=False, failure_reason="unknown_group")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite", busy_timeout_s=0.05)
    yield opened
    opened.close()


@asynccontextmanager
async def delivering(
    swarm: ScriptedSwarm, ledger: Ledger, held_out: HeldOutGroups | None = None
) -> AsyncGenerator[Delivery]:
    swarm_link = SwarmLink(swarm.url, None, TrainJob(), ledger)
    following = asyncio.create_task(swarm_link.run())
    delivery = Delivery(ledger, swarm_link, held_out=held_out)
    try:
        yield delivery
    finally:
        await delivery.close()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await swarm_link.close()


def outcome(ledger: Ledger, group_id: str) -> tuple[str, str | None]:
    assert ledger.drain()
    found = ledger.group(group_id)
    assert found is not None
    return found.state, found.reason


@pytest.mark.parametrize(
    ("answer", "state", "reason"),
    [
        (POOLED, "pooled", None),
        (UNKNOWN, "lost", "unknown_group"),
        (422, "lost", "swarm_refused: 422"),
    ],
)
async def test_groups_left_scored_by_an_earlier_process_are_sent_once_the_server_is_reachable(
    ledger: Ledger, answer: object, state: str, reason: str | None
) -> None:
    ledger.record(group("old", [1.0, None, 0.0], task_id="t"))
    ledger.record(group("done", state="pooled"))
    assert ledger.drain()
    async with ScriptedSwarm() as swarm, delivering(swarm, ledger) as delivery:
        swarm.answers |= {"/get_engine_status": 503, "/end_group": answer}
        delivery.resend(ledger.scored_groups())
        await until(lambda: swarm.calls["/get_engine_status"] > 1)
        assert swarm.calls["/end_group"] == 0
        swarm.answers["/get_engine_status"] = ScriptedSwarm().answers["/get_engine_status"]
        await until(lambda: outcome(ledger, "old") == (state, reason))
        assert swarm.calls["/end_group"] == 1
        sent = swarm.bodies["/end_group"]
    assert (sent["group_id"], sent["rewards"], sent["task_id"]) == ("old", [1.0, None, 0.0], "t")
    assert sent["metadata"] == {}, "the server does not need the prompt again"


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "So: what is 2 plus 5? Say it."}],
        [
            {"role": "user", "content": "What is 2 plus 5?"},
            {"role": "assistant", "content": "Which base?"},
            {"role": "user", "content": "Ten."},
        ],
    ],
)
async def test_a_group_whose_row_was_held_out_after_it_was_scored_is_not_sent_again(
    ledger: Ledger, messages: list[dict[str, str]]
) -> None:
    body = orjson.dumps({"messages": messages}).decode()
    question = messages[-1]["content"]
    ledger.record(replace(group("row"), request_json=body, question=question))
    ledger.record(group("other"))
    assert ledger.drain()
    held_out = HeldOutGroups(HeldOutRows([Task(main_query="What is 2 plus 5?")]), ledger)
    async with ScriptedSwarm() as swarm, delivering(swarm, ledger, held_out) as delivery:
        swarm.answers["/end_group"] = POOLED
        swarm.answers["/abort_group"] = SuccessReply(success=True)
        delivery.resend(ledger.scored_groups())
        await until(lambda: outcome(ledger, "other") == ("pooled", None))
        await until(lambda: outcome(ledger, "row") == ("dropped", "held_out"))
        assert swarm.calls["/end_group"] == 1 and swarm.bodies["/end_group"]["group_id"] == "other"
        await until(lambda: swarm.bodies.get("/abort_group") == {"group_id": "row"})


async def test_a_group_of_a_task_that_was_held_out_later_is_not_sent_again(ledger: Ledger) -> None:
    task = Task(task_id="t", main_query="What is 2 plus 5?")
    ledger.put_tasks([task])
    ledger.record(group("row", task_id="t"))
    assert ledger.drain()
    held_out = HeldOutGroups(HeldOutRows([task]), ledger)
    async with ScriptedSwarm() as swarm, delivering(swarm, ledger, held_out) as delivery:
        delivery.resend(ledger.scored_groups())
        await until(lambda: outcome(ledger, "row") == ("dropped", "held_out"))
        assert swarm.calls["/end_group"] == 0


async def test_a_stop_while_the_server_is_unreachable_leaves_the_group_scored(
    ledger: Ledger,
) -> None:
    ledger.record(group("old"))
    assert ledger.drain()
    async with ScriptedSwarm() as swarm:
        swarm.answers["/get_engine_status"] = 503
        async with delivering(swarm, ledger) as delivery:
            delivery.resend(ledger.scored_groups())
    assert [left.group_id for left in ledger.scored_groups()] == ["old"]


async def test_a_group_that_the_server_refuses_is_lost_without_retries(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/end_group"] = 422
        async with delivering(swarm, ledger) as delivery:
            delivery.settle(group("g1"))
            await until(lambda: bool(swarm.calls["/end_group"]))
        assert swarm.calls["/end_group"] == 1
    assert outcome(ledger, "g1") == ("lost", "swarm_refused: 422")


async def test_the_end_of_a_group_is_sent_again_after_each_transient_error(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_client, "MAX_RETRY_PAUSE_S", 0.0)
    async with ScriptedSwarm() as swarm, delivering(swarm, ledger) as delivery:
        swarm.answers["/end_group"] = 503
        delivery.settle(group("g1"))
        await until(lambda: swarm.calls["/end_group"] >= 3)
        swarm.answers["/end_group"] = POOLED
        await until(lambda: outcome(ledger, "g1") == ("pooled", None))


def _without_retries(post: T) -> T:
    """Replace the link's retries, which take up to a minute."""
    return post


async def test_a_group_waits_until_the_server_is_reachable_and_is_sent_then(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_client, "_with_retries", _without_retries)
    monkeypatch.setattr(delivery_module, "RESEND_PAUSE_S", 0.0)
    async with ScriptedSwarm() as swarm, delivering(swarm, ledger) as delivery:
        well = swarm.answers["/get_engine_status"]
        swarm.answers |= {"/get_engine_status": 503, "/end_group": 503}
        await until(lambda: swarm.calls["/get_engine_status"] > 1)
        delivery.settle(group("g1"))
        await until(lambda: bool(swarm.calls["/end_group"]))
        assert outcome(ledger, "g1") == ("scored", None)
        swarm.answers |= {"/get_engine_status": well, "/end_group": POOLED}
        await until(lambda: outcome(ledger, "g1") == ("pooled", None))
        assert swarm.calls["/end_group"] == 2


async def test_a_group_that_the_server_already_has_with_other_rewards_is_pooled(
    ledger: Ledger,
) -> None:
    async with ScriptedSwarm() as swarm, delivering(swarm, ledger) as delivery:
        swarm.answers["/end_group"] = 409
        delivery.settle(group("g1"))
        await until(lambda: bool(swarm.calls["/end_group"]))
    assert outcome(ledger, "g1") == ("pooled", None)


async def test_a_group_that_is_too_large_to_send_is_lost_with_the_reason(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm, delivering(swarm, ledger) as delivery:
        delivery.settle(group("g1", [0.5] * 300))
        await until(lambda: outcome(ledger, "g1") == ("lost", "end_failed: ValidationError"))


async def test_a_group_that_the_ledger_does_not_have_is_not_trained(
    ledger: Ledger, tmp_path: Path
) -> None:
    other = sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    async with ScriptedSwarm() as swarm:
        swarm.answers |= {"/end_group": POOLED, "/abort_group": SuccessReply(success=True)}
        async with delivering(swarm, ledger) as delivery:
            delivery.settle(group("g1"))
        assert swarm.calls["/end_group"] == 0
        assert swarm.bodies["/abort_group"] == {"group_id": "g1"}
    other.close()


async def test_one_unwritable_group_does_not_hold_back_the_groups_of_the_same_flush(
    ledger: Ledger,
) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers |= {"/end_group": POOLED, "/abort_group": SuccessReply(success=True)}
        async with delivering(swarm, ledger) as delivery:
            delivery.settle(group("before"))
            delivery.settle(replace(group("bad"), question="\ud800"))
            delivery.settle(group("after"))
            await until(lambda: swarm.calls["/end_group"] + swarm.calls["/abort_group"] == 3)
        assert (swarm.calls["/end_group"], swarm.calls["/abort_group"]) == (2, 1)
        assert swarm.bodies["/abort_group"] == {"group_id": "bad"}
    assert outcome(ledger, "before") == outcome(ledger, "after") == ("pooled", None)
    assert ledger.group("bad") is None
