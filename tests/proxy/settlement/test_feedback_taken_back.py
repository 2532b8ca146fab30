"""Withdrawals of feedback that race with other work: either the feedback counts for nothing, or the
reply says that it counts."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest

from fakevllm.ledger.records import FeedbackRecord, FeedbackState
from fakevllm.settlement import feedback_service
from fakevllm.web.proxy_components import ProxyComponents
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.swarm import AddSampleRequest, EndGroupReply
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.scripted_swarm import until
from tests.proxy.settlement.feedback_rig import (
    KEY,
    POOLED,
    feedback_on,
    open_feedback_proxy,
    record_pooled,
    rows,
    until_states,
)


async def test_feedback_that_is_taken_back_while_another_is_sent_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, _):
        record_pooled(proxy, "g1", "g2", "g3")
        sent: list[str] = []
        release = asyncio.Event()

        async def slow(request: AddSampleRequest) -> EndGroupReply:
            sent.append(request.sample_id.partition("/")[0])
            await release.wait()
            return POOLED

        monkeypatch.setattr(proxy.link, "add_sample", slow)
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        await until(lambda: len(sent) == 1)
        await service.accept(feedback_on("g3", score=0.25), KEY)
        row, _ = await service.accept(feedback_on("g2", thumbs=None), KEY)
        assert (row.state, row.reason) == ("kept", "taken_back")
        release.set()
        rows_ = await until_states(proxy, "pooled", "kept", "kept", "pooled")
        assert sent == ["feedback:g1", "feedback:g3"]
        assert {row.reason for row in rows_[1:3]} == {"taken_back"}


async def test_feedback_that_is_taken_back_while_it_is_sent_stays_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, _):
        record_pooled(proxy, "g1", "g2")
        is_sent, release = asyncio.Event(), asyncio.Event()

        async def slow(request: AddSampleRequest) -> EndGroupReply:
            is_sent.set()
            await release.wait()
            return POOLED

        monkeypatch.setattr(proxy.link, "add_sample", slow)
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        await is_sent.wait()
        await service.accept(feedback_on("g1", thumbs=None), KEY)
        release.set()
        await until(lambda: any(row.amount for row in rows(proxy)))
        assert [row.state for row in rows(proxy) if row.group_id == "g1"] == ["kept", "kept"]


def block_ledger(proxy: ProxyComponents) -> threading.Event:
    """Block the ledger's writer until the returned event is set."""
    release = threading.Event()

    def wait(db: object) -> None:
        release.wait()

    proxy.ledger.feedback._put(wait)  # pyright: ignore[reportPrivateUsage]
    return release


async def test_feedback_that_is_taken_back_while_the_ledger_is_stuck_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path, window_s=1000.0) as (proxy, service, _):
        proxy.delivery.register_answer("g1", "chatcmpl-1", KEY, None)
        await service.accept(feedback_on("chatcmpl-1"), KEY)
        feedback, flush = proxy.ledger.feedback, proxy.ledger.flush
        outcome = feedback.set_outcome
        taken_back, is_joined, is_void = feedback.mark_too_late, asyncio.Event(), asyncio.Event()

        def joined(row: FeedbackRecord, state: FeedbackState, *parts: Any, **values: Any) -> Any:
            if state is FeedbackState.JOINED:
                is_joined.set()
            return outcome(row, state, *parts, **values)

        def then_void(row: FeedbackRecord) -> Any:
            receipt = taken_back(row)
            is_void.set()
            return receipt

        async def failing_flush(*limit_s: float) -> bool:
            """Fail the service's flushes; each waits for the worst that the other task may do."""
            if limit_s != (feedback_service.FLUSH_S,):
                return await flush(*limit_s)
            event_of_other_task = is_joined if asyncio.current_task() is taking_back else is_void
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await event_of_other_task.wait()
            return False

        monkeypatch.setattr(feedback, "set_outcome", joined)
        monkeypatch.setattr(feedback, "mark_too_late", then_void)
        with monkeypatch.context() as stuck_ledger:
            stuck_ledger.setattr(proxy.ledger, "flush", failing_flush)
            taking_back = asyncio.create_task(
                service.accept(feedback_on("chatcmpl-1", thumbs=None), KEY)
            )
            proxy.delivery.settle(group("g1", [0.5, 1.0]))  # the feedback would be processed now
            with pytest.raises(WireError, match="Try again"):
                await taking_back
            await until(lambda: not service._in_progress)  # pyright: ignore[reportPrivateUsage]
        row, _ = await service.accept(feedback_on("chatcmpl-1", thumbs=None), KEY)
        assert (row.state, row.reason) == ("kept", "taken_back")
        assert {one.reason for one in rows(proxy)} == {"taken_back"}


async def test_feedback_that_is_being_taken_back_is_not_sent_while_the_ledger_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, swarm):
        record_pooled(proxy, "g1", "g2")
        await service.accept(feedback_on("g1"), KEY)
        await until_states(proxy, "waiting")
        served_calls, is_read, may_read = (
            proxy.ledger.feedback.served_calls,
            asyncio.Event(),
            threading.Event(),
        )
        loop = asyncio.get_running_loop()

        def slow(group_id: str) -> Any:
            if group_id == "g1":
                loop.call_soon_threadsafe(is_read.set)
                may_read.wait()
            return served_calls(group_id)

        monkeypatch.setattr(proxy.ledger.feedback, "served_calls", slow)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        await is_read.wait()
        put, is_put = proxy.ledger.feedback.mark_too_late, asyncio.Event()

        def then_put(row: FeedbackRecord) -> Any:
            receipt = put(row)
            is_put.set()
            return receipt

        monkeypatch.setattr(proxy.ledger.feedback, "mark_too_late", then_put)
        of_group = proxy.ledger.feedback.of_group

        def then_stuck(group_id: str) -> Any:
            rows_ = of_group(group_id)
            loop.call_soon_threadsafe(gates.append, block_ledger(proxy))
            return rows_

        gates: list[threading.Event] = []
        monkeypatch.setattr(proxy.ledger.feedback, "of_group", then_stuck)
        taking_back = asyncio.create_task(service.accept(feedback_on("g1", thumbs=None), KEY))
        await is_put.wait()
        monkeypatch.setattr(proxy.ledger.feedback, "of_group", of_group)
        flush, is_flushing = proxy.ledger.flush, asyncio.Event()

        async def watched(*limit_s: float) -> bool:
            is_flushing.set()
            return await flush(*limit_s)

        monkeypatch.setattr(proxy.ledger, "flush", watched)
        may_read.set()
        await is_flushing.wait()
        gates[0].set()
        row, _ = await taking_back
        assert (row.state, row.reason) == ("kept", "taken_back")
        await until_states(proxy, "kept", "kept", "waiting")
        assert await proxy.ledger.flush()
        assert swarm.calls["/add_sample"] == 0
