"""Feedback during faults: acknowledged feedback is not lost, and none is trained twice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.ledger.store import Ledger
from fakevllm.sessions.types import Kind, Place
from fakevllm.settlement.reward_delivery import Delivery
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.web.proxy_components import ProxyComponents
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.swarm import EndGroupReply, EngineStatus
from tests.proxy.ledger.ledger_cases import call, group
from tests.proxy.scripted_swarm import ROLLING, ScriptedSwarm, until
from tests.proxy.settlement.feedback_rig import (
    KEY,
    POOLED,
    feedback_on,
    open_feedback_proxy,
    record_pooled,
    rows,
    until_states,
)

BOOTING = ROLLING.model_copy(update={"engine_status": EngineStatus.BOOTING})


async def test_no_sample_is_sent_before_the_engine_serves(tmp_path: Path) -> None:
    async with open_feedback_proxy(tmp_path, status=BOOTING) as (proxy, service, swarm):
        swarm.answers["/add_sample"] = 503
        record_pooled(proxy, "g1", "g2")
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        await until_states(proxy, "waiting", "waiting")
        polled = swarm.calls["/get_engine_status"]
        await until(lambda: swarm.calls["/get_engine_status"] > polled + 2)
        assert swarm.calls["/add_sample"] == 0
        swarm.answers |= {"/add_sample": POOLED, "/get_engine_status": ROLLING}
        await until_states(proxy, "pooled", "pooled")


async def test_feedback_that_the_ledger_could_not_store_is_not_added_to_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path, window_s=1000.0) as (proxy, service, swarm):
        swarm.answers["/end_group"] = EndGroupReply(
            success=True, pooled=True, step=1, run_id="r", calls=[[call()], [call()]]
        )
        record_pooled(proxy, "g2")
        proxy.delivery.register_answer("g1", "chatcmpl-1", KEY, None)
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await proxy.delivery.wait_recorded("g1")
        put = proxy.ledger.feedback.set_outcome

        def full_disk(row: FeedbackRecord, state: FeedbackState, *parts: Any, **values: Any) -> Any:
            if state is not FeedbackState.JOINED:
                return put(row, state, *parts, **values)
            return proxy.ledger.feedback._put(lambda db: db.exec_driver_sql("no SQL"))  # pyright: ignore[reportPrivateUsage,reportArgumentType,reportUnknownLambdaType]

        monkeypatch.setattr(proxy.ledger.feedback, "set_outcome", full_disk)
        await service.accept(feedback_on("chatcmpl-1"), KEY)
        await until_states(proxy, "waiting")
        assert swarm.calls["/end_group"] == 0
    async with open_feedback_proxy(tmp_path) as (proxy, service, swarm):
        swarm.answers["/end_group"] = POOLED.model_copy(
            update={"run_id": "r", "calls": [[call()], [call()]]}
        )
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [0.5, 1.0]
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        await until_states(proxy, "pooled", "pooled")


async def test_no_event_is_left_after_a_window_has_ended(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    async with ScriptedSwarm() as swarm:
        swarm.answers["/end_group"] = POOLED
        link = SwarmLink(swarm.url, None, TrainJob(), ledger)
        one = Delivery(ledger, link, 0.1)
        for at in range(5):
            one.settle(group(f"g{at}"))
        await until(lambda: swarm.calls["/end_group"] == 5)
        assert one._change_events == {}  # pyright: ignore[reportPrivateUsage]
        await one.close()
        await link.close()
    ledger.close()


async def test_only_feedback_of_keys_with_a_baseline_is_read(tmp_path: Path) -> None:
    async with open_feedback_proxy(tmp_path, num_for_baseline=3) as (proxy, _, swarm):
        record_pooled(proxy, "g1", "g2")
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


async def test_groups_without_feedback_do_not_wake_the_late_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, swarm):
        swarm.answers["/end_group"] = EndGroupReply(
            success=True, pooled=True, step=1, run_id="r", calls=[[call()], [call()]]
        )
        looks: list[int] = []
        look = proxy.ledger.feedback.with_baseline

        def counted(num: int) -> list[tuple[str, str, bool]]:
            looks.append(num)
            return look(num)

        monkeypatch.setattr(proxy.ledger.feedback, "with_baseline", counted)
        record_pooled(proxy, "g2")
        proxy.ledger.record(group("g1", [0.5, 1.0]))
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        await until_states(proxy, "waiting", "pooled")
        before = len(looks)
        for at in range(5):
            proxy.delivery.settle(group(f"other-{at}"))
            await until(lambda at=at: swarm.calls["/end_group"] == at + 1)
        assert len(looks) == before
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await until_states(proxy, "pooled", "pooled")


async def test_feedback_about_one_answer_does_not_wait_for_feedback_about_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, _):
        record_pooled(proxy, "g1", "g2")
        assert await proxy.ledger.flush()
        flush, is_slow, go_on = proxy.ledger.flush, asyncio.Event(), asyncio.Event()

        async def slow(*limit_s: float) -> bool:
            if asyncio.current_task() in slow_ones:
                is_slow.set()
                await go_on.wait()
            return await flush(*limit_s)

        monkeypatch.setattr(proxy.ledger, "flush", slow)
        slow_ones = {
            asyncio.create_task(service.accept(feedback_on(name), KEY)) for name in ("g1", "none")
        }
        await is_slow.wait()
        async with asyncio.timeout(30):
            await service.accept(feedback_on("g2"), KEY)
        go_on.set()
        results = await asyncio.gather(*slow_ones, return_exceptions=True)
        assert sum(isinstance(result, WireError) for result in results) == 1
        assert await until_states(proxy, "dropped", "dropped")


async def test_each_feedback_that_cannot_be_stored_gets_an_error_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, _):
        record_pooled(proxy, "g1")
        assert await proxy.ledger.flush()

        async def failing_flush(*limit_s: float) -> bool:
            return False

        monkeypatch.setattr(proxy.ledger, "flush", failing_flush)
        errors: list[WireError] = []
        for comment in ("one", "two"):
            with pytest.raises(WireError) as error:
                await service.accept(feedback_on("g1", comment=comment), KEY)
            errors.append(error.value)
        assert errors[0] is not errors[1] and {one.status for one in errors} == {503}


async def test_feedback_is_accepted_beside_an_unwritable_row_in_the_same_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path, window_s=1000.0) as (proxy, service, swarm):
        swarm.answers["/end_group"] = POOLED
        proxy.delivery.register_answer("g1", "chatcmpl-1", KEY, None)
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await proxy.delivery.wait_recorded("g1")
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
        row, was_known = await service.accept(feedback_on("chatcmpl-1"), KEY)
        assert (row.state, was_known) == ("received", False)
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [1.5, 1.0]
        assert proxy.ledger.health.dropped == 2
        assert [found.state for found in rows(proxy)] == ["joined"]


FOLLOWED = """
def on_feedback(feedback):
    return 0.25 if feedback.messages == [{"role": "user", "content": "Hi"}] else None
"""


def record_held(proxy: ProxyComponents) -> None:
    """Record a held group of an earlier process, in the Responses format."""
    request = '{"model": "m", "input": "Hi"}'
    one = replace(group("g1", [0.5, 1.0]), route="/v1/responses", request_json=request)
    proxy.ledger.record(replace(one, session_id="s", turn=1, kind="new", evidence="none"))


async def test_a_restored_group_is_held_while_feedback_about_it_is_in_progress(
    tmp_path: Path,
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, _, _):
        record_held(proxy)
    async with open_feedback_proxy(tmp_path, status=503, hooks=FOLLOWED) as (proxy, service, swarm):
        swarm.answers["/end_group"] = POOLED
        proxy.delivery.feedback_started("g1")  # other feedback is in progress
        place = Place(session_id="s", parent_id="g1", turn=2, kind=Kind.CONTINUES)
        service.request_placed("g2", place, "thanks")
        await until_states(proxy, "joined")
        swarm.answers["/get_engine_status"] = ROLLING
        await proxy.link.reached.wait()
        polled = swarm.calls["/get_engine_status"]
        await until(lambda: swarm.calls["/get_engine_status"] > polled + 1)
        assert swarm.calls["/end_group"] == 0
        proxy.delivery.feedback_finished("g1", None)
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [0.75, 1.0]


async def test_implicit_feedback_whose_row_was_not_written_is_not_added_to_the_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, _, _):
        record_held(proxy)
    async with open_feedback_proxy(tmp_path, status=503, hooks=FOLLOWED) as (proxy, service, swarm):
        swarm.answers["/end_group"] = POOLED
        record = proxy.ledger.feedback.record

        def record_unwritable(row: FeedbackRecord) -> Any:
            return record(replace(row, comment="\ud800"))

        monkeypatch.setattr(proxy.ledger.feedback, "record", record_unwritable)
        place = Place(session_id="s", parent_id="g1", turn=2, kind=Kind.CONTINUES)
        service.request_placed("g2", place, "thanks")
        await until(lambda: proxy.ledger.health.dropped == 1)
        swarm.answers["/get_engine_status"] = ROLLING
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [0.5, 1.0]


async def test_feedback_that_was_stored_just_before_a_stop_is_added_after_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, swarm):
        swarm.answers["/end_group"] = POOLED
        proxy.delivery.register_answer("g1", "chatcmpl-1", KEY, None)
        await service.accept(feedback_on("chatcmpl-1"), KEY)
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
    async with open_feedback_proxy(tmp_path) as (proxy, _, swarm):
        swarm.answers["/end_group"] = POOLED
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [1.5, 1.0]
