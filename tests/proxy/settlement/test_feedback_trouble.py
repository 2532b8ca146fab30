"""Feedback while something else happens: what is acknowledged holds, and nothing trains twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.store import Ledger
from fakevllm.sessions.types import Kind, Place
from fakevllm.settlement.delivery import Delivery
from fakevllm.swarm.link import SwarmLink
from fakevllm.web.components import ProxyComponents
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.swarm import EndGroupReply, EngineStatus
from tests.proxy.ledger.ledger_cases import call, group
from tests.proxy.odd_swarm import ROLLING, OddSwarm, until
from tests.proxy.settlement.feedback_rig import KEY, POOLED, ended, opened, rows, said, until_states

BOOTING = ROLLING.model_copy(update={"engine_status": EngineStatus.BOOTING})


async def test_no_sample_is_sent_before_the_engine_serves(tmp_path: Path) -> None:
    async with opened(tmp_path, status=BOOTING) as (proxy, desk, swarm):
        swarm.answers["/add_sample"] = 503
        ended(proxy, "g1", "g2")
        await desk.take(said("g1"), KEY)
        await desk.take(said("g2", thumbs="down"), KEY)
        await until_states(proxy, "waiting", "waiting")
        polled = swarm.calls["/get_engine_status"]
        await until(lambda: swarm.calls["/get_engine_status"] > polled + 2)
        assert swarm.calls["/add_sample"] == 0
        swarm.answers |= {"/add_sample": POOLED, "/get_engine_status": ROLLING}
        await until_states(proxy, "pooled", "pooled")


async def test_what_the_ledger_does_not_have_is_not_added_to_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, window_s=1000.0) as (proxy, desk, swarm):
        swarm.answers["/end_group"] = EndGroupReply(
            success=True, pooled=True, step=1, run_id="r", calls=[[call()], [call()]]
        )
        ended(proxy, "g2")
        proxy.delivery.answered("g1", "chatcmpl-1", KEY, None)
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await proxy.delivery.until_over("g1")
        put = proxy.ledger.feedback.set_outcome

        def full_disk(row: FeedbackRecord, state: FeedbackState, *told: Any, **more: Any) -> Any:
            if state is not FeedbackState.JOINED:
                return put(row, state, *told, **more)
            return proxy.ledger.feedback._put(lambda db: db.exec_driver_sql("no SQL"))  # pyright: ignore[reportPrivateUsage,reportArgumentType,reportUnknownLambdaType]

        monkeypatch.setattr(proxy.ledger.feedback, "set_outcome", full_disk)
        await desk.take(said("chatcmpl-1"), KEY)
        await until_states(proxy, "waiting")
        assert swarm.calls["/end_group"] == 0
    async with opened(tmp_path) as (proxy, desk, swarm):
        swarm.answers["/end_group"] = POOLED.model_copy(
            update={"run_id": "r", "calls": [[call()], [call()]]}
        )
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [0.5, 1.0]
        await desk.take(said("g2", thumbs="down"), KEY)
        await until_states(proxy, "pooled", "pooled")


async def test_a_window_that_runs_out_leaves_nothing_behind(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    async with OddSwarm() as swarm:
        swarm.answers["/end_group"] = POOLED
        link = SwarmLink(swarm.url, None, TrainJob(), ledger)
        one = Delivery(ledger, link, 0.1)
        for at in range(5):
            one.settle(group(f"g{at}"))
        await until(lambda: swarm.calls["/end_group"] == 5)
        assert one._changed == {}  # pyright: ignore[reportPrivateUsage]
        await one.close()
        await link.close()
    ledger.close()


async def test_keys_with_too_few_feedbacks_are_not_looked_through(tmp_path: Path) -> None:
    async with opened(tmp_path, num_for_baseline=3) as (proxy, _, swarm):
        ended(proxy, "g1", "g2")
        proxy.ledger.record(group("g3", [0.5, 1.0]))
        keys = {"g1": "a", "g2": "a", "g3": "b", "x": "b", "y": "b"}
        for at, (name, key) in enumerate(keys.items()):
            state = FeedbackState.KEPT if name == "y" else FeedbackState.WAITING
            row = FeedbackRecord(
                group_id=name,
                feedback_id="f",
                received_at=at,
                app_key=key,
                value=1.0,
                state=state,
            )
            proxy.ledger.feedback.record(row)
        assert await proxy.ledger.flush()
        found = proxy.ledger.feedback.with_baseline(3)
        assert found == [("g3", "f", False), ("x", "f", True)]
        assert [len(proxy.ledger.feedback.with_baseline(num)) for num in (2, 4)] == [4, 0]
        assert swarm.calls["/add_sample"] == 0


async def test_groups_nobody_speaks_of_do_not_wake_who_sends_feedback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as (proxy, desk, swarm):
        swarm.answers["/end_group"] = EndGroupReply(
            success=True, pooled=True, step=1, run_id="r", calls=[[call()], [call()]]
        )
        looks: list[int] = []
        look = proxy.ledger.feedback.with_baseline

        def counted(num: int) -> list[tuple[str, str, bool]]:
            looks.append(num)
            return look(num)

        monkeypatch.setattr(proxy.ledger.feedback, "with_baseline", counted)
        ended(proxy, "g2")
        proxy.ledger.record(group("g1", [0.5, 1.0]))
        await desk.take(said("g1"), KEY)
        await desk.take(said("g2", thumbs="down"), KEY)
        await until_states(proxy, "waiting", "pooled")
        before = len(looks)
        for at in range(5):
            proxy.delivery.settle(group(f"other-{at}"))
            await until(lambda at=at: swarm.calls["/end_group"] == at + 1)
        assert len(looks) == before
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await until_states(proxy, "pooled", "pooled")


async def test_one_answers_feedback_does_not_wait_for_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as (proxy, desk, _):
        ended(proxy, "g1", "g2")
        assert await proxy.ledger.flush()
        flush, is_slow, go_on = proxy.ledger.flush, asyncio.Event(), asyncio.Event()

        async def slow(*limit_s: float) -> bool:
            if asyncio.current_task() in slow_ones:
                is_slow.set()
                await go_on.wait()
            return await flush(*limit_s)

        monkeypatch.setattr(proxy.ledger, "flush", slow)
        slow_ones = {asyncio.create_task(desk.take(said(name), KEY)) for name in ("g1", "none")}
        await is_slow.wait()
        async with asyncio.timeout(5):
            await desk.take(said("g2"), KEY)
        go_on.set()
        told = await asyncio.gather(*slow_ones, return_exceptions=True)
        assert sum(isinstance(one, WireError) for one in told) == 1
        assert await until_states(proxy, "dropped", "dropped")


async def test_each_feedback_that_cannot_be_kept_gets_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as (proxy, desk, _):
        ended(proxy, "g1")
        assert await proxy.ledger.flush()

        async def in_vain(*limit_s: float) -> bool:
            return False

        monkeypatch.setattr(proxy.ledger, "flush", in_vain)
        told: list[WireError] = []
        for comment in ("one", "two"):
            with pytest.raises(WireError) as error:
                await desk.take(said("g1", comment=comment), KEY)
            told.append(error.value)
        assert told[0] is not told[1] and {one.status for one in told} == {503}


async def test_feedback_is_accepted_beside_an_unwritable_row_in_the_same_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path, window_s=1000.0) as (proxy, desk, swarm):
        swarm.answers["/end_group"] = POOLED
        proxy.delivery.answered("g1", "chatcmpl-1", KEY, None)
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await proxy.delivery.until_over("g1")
        record, outcome = proxy.ledger.feedback.record, proxy.ledger.feedback.set_outcome
        bad = replace(group("bad"), question="\ud800")

        def record_beside_bad(row: FeedbackRecord) -> Any:
            proxy.ledger.record(bad)
            return record(row)

        def outcome_beside_bad(*parts: Any, **values: Any) -> Any:
            proxy.ledger.record(bad)
            return outcome(*parts, **values)

        monkeypatch.setattr(proxy.ledger.feedback, "record", record_beside_bad)
        monkeypatch.setattr(proxy.ledger.feedback, "set_outcome", outcome_beside_bad)
        row, was_known = await desk.take(said("chatcmpl-1"), KEY)
        assert (row.state, was_known) == ("received", False)
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [1.5, 1.0]
        assert proxy.ledger.health.dropped == 2
        assert [found.state for found in rows(proxy)] == ["joined"]


FOLLOWED = """
def on_feedback(feedback):
    return 0.25 if feedback.messages == [{"role": "user", "content": "Hi"}] else None
"""


def recorded(proxy: ProxyComponents) -> None:
    """A held group of an earlier life, in the format of Responses."""
    request = '{"model": "m", "input": "Hi"}'
    one = replace(group("g1", [0.5, 1.0]), route="/v1/responses", request_json=request)
    proxy.ledger.record(replace(one, session_id="s", turn=1, kind="new", evidence="none"))


async def test_a_held_group_of_an_earlier_life_waits_for_all_that_is_said_of_it(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as (proxy, _, _):
        recorded(proxy)
    async with opened(tmp_path, status=503, hooks=FOLLOWED) as (proxy, desk, swarm):
        swarm.answers["/end_group"] = POOLED
        proxy.delivery.hear("g1")  # somebody is still speaking
        place = Place(session_id="s", parent_id="g1", turn=2, kind=Kind.CONTINUES)
        desk.followed("g2", place, "thanks")
        await until_states(proxy, "joined")
        swarm.answers["/get_engine_status"] = ROLLING
        await proxy.link.reached.wait()
        polled = swarm.calls["/get_engine_status"]
        await until(lambda: swarm.calls["/get_engine_status"] > polled + 1)
        assert swarm.calls["/end_group"] == 0
        proxy.delivery.heard("g1", None)
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [0.75, 1.0]


async def test_a_signal_whose_row_was_not_written_is_not_added_to_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as (proxy, _, _):
        recorded(proxy)
    async with opened(tmp_path, status=503, hooks=FOLLOWED) as (proxy, desk, swarm):
        swarm.answers["/end_group"] = POOLED
        record = proxy.ledger.feedback.record

        def record_unwritable(row: FeedbackRecord) -> Any:
            return record(replace(row, comment="\ud800"))

        monkeypatch.setattr(proxy.ledger.feedback, "record", record_unwritable)
        place = Place(session_id="s", parent_id="g1", turn=2, kind=Kind.CONTINUES)
        desk.followed("g2", place, "thanks")
        await until(lambda: proxy.ledger.health.dropped == 1)
        swarm.answers["/get_engine_status"] = ROLLING
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [0.5, 1.0]


async def test_a_stop_between_the_ledger_and_the_group_leaves_the_group_to_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as (proxy, desk, swarm):
        swarm.answers["/end_group"] = POOLED
        proxy.delivery.answered("g1", "chatcmpl-1", KEY, None)
        await desk.take(said("chatcmpl-1"), KEY)
        flush = proxy.ledger.flush
        is_joined = asyncio.Event()

        async def stuck(*limit_s: float) -> bool:
            is_written = await flush(*limit_s)
            if limit_s:
                is_joined.set()
                await asyncio.Event().wait()
            return is_written

        monkeypatch.setattr(proxy.ledger, "flush", stuck)
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await is_joined.wait()
        assert [row.state for row in rows(proxy)] == ["joined"]
    assert swarm.calls["/end_group"] == 0
    async with opened(tmp_path) as (proxy, _, swarm):
        swarm.answers["/end_group"] = POOLED
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [1.5, 1.0]
