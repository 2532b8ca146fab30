"""The group executor: the app's answer, the record, and the tasks after the end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fakevllm.groups import group_executor
from fakevllm_adapters.formats.sse import DONE
from tests.proxy.groups.group_rig import ALIVE, answer_of, chunks_of, staged


async def test_the_best_answer_is_served_unchanged_and_its_selection_is_recorded() -> None:
    async with staged(3) as stage:
        for index in (2, 0, 1):
            await stage.act(index, "answers")
        assert not stage.sent
        await stage.score(0.0, 1.0, 0.5)
        assert stage.body == answer_of(1) and stage.is_answered
        record = stage.record
    assert (record.state, record.served_index, record.best_index) == ("scored", 1, 1)
    assert (record.served_by, record.propensity, record.status) == ("best", 1.0, 200)
    assert stage.sibling_limit.in_flight == 0


async def test_a_quorum_is_served_and_the_late_sibling_is_scored_and_recorded() -> None:
    async with staged(4, quorum=3) as stage:
        for index in (0, 3, 1):
            await stage.act(index, "answers")
        await stage.score(0.0, 1.0, 0.5)
        assert stage.body == answer_of(1) and stage.handler.done()
        assert not stage.records and 2 in stage.upstream.words
        await stage.act(2, "answers")
        await stage.score(0.0, 0.5, 1.0, 0.1)
        record = stage.record
    assert stage.hook.scored == [[0, 1, 3], [0, 1, 2, 3]]
    assert (record.state, record.served_index, record.best_index) == ("scored", 1, 2)
    assert [sibling.reward for sibling in record.siblings] == [0.0, 0.5, 1.0, 0.1]


async def test_at_the_deadline_the_best_answer_so_far_is_served() -> None:
    async with staged(3, deadline_s=0.05) as stage:
        await stage.act(0, "answers")
        await stage.act(2, "answers")
        async with asyncio.timeout(30):
            while stage.hook.waiting is None:
                await asyncio.sleep(0.01)
        await stage.score(0.0, 1.0)
        assert stage.body == answer_of(2)
        await stage.act(1, "fails")
        assert stage.record.state == "scored"


@pytest.mark.parametrize("policy", ["lead", "greedy"])
async def test_a_leads_chunks_are_sent_at_once_and_start_its_siblings(policy: str) -> None:
    role, token, *rest = chunks_of(0)
    async with staged(3, streamed=True, policy=policy) as stage:
        assert stage.upstream.started == [0] and not stage.sent
        await stage.act(0, "tells its role")
        assert stage.body == ALIVE + role and stage.upstream.started == [0]
        await stage.act(0, "begins")
        assert stage.body == ALIVE + role + token and stage.upstream.started == [0, 1, 2]
        await stage.act(2, "answers")
        await stage.act(0, "answers")
        assert stage.body == b"".join([ALIVE, role, token, *rest, DONE]) and stage.is_answered
        assert stage.handler.done() and not stage.records
        await stage.act(1, "answers")
        await stage.score(0.0, 1.0, 0.5)
        record = stage.record
    assert (record.state, record.served_index, record.best_index) == ("scored", 0, 1)
    assert (record.served_by, record.propensity) == (policy, 1.0)
    assert ("temperature" in stage.upstream.bodies[0]) == (policy == "greedy")
    assert stage.upstream.bodies[1]["temperature"] == 1.0


async def test_the_recorded_duration_is_the_time_the_app_waited() -> None:
    async with staged(2, streamed=True, policy="lead") as stage:
        await stage.act(0, "answers")
        await asyncio.sleep(0.2)
        await stage.act(1, "answers")
        await stage.score(0.0, 1.0)
        assert stage.record.latency_s < 0.2


async def test_a_lead_that_fails_mid_stream_ends_with_an_error_and_ends_its_group() -> None:
    async with staged(3, streamed=True, policy="lead") as stage:
        await stage.act(0, "begins")
        await stage.act(0, "breaks")
        assert stage.body.startswith(ALIVE + chunks_of(0)[0]) and stage.body.endswith(DONE)
        assert b'"error"' in stage.body
        record = stage.record
    assert (record.state, record.reason, record.served_index) == ("failed", "no_answer", None)
    assert sorted(stage.upstream.ended) == [0, 1, 2]


@pytest.mark.parametrize("word", ["is refused", "is too much", "fails"])
async def test_an_error_of_a_streaming_lead_is_sent_and_starts_no_siblings(word: str) -> None:
    status = {"is refused": 400, "is too much": 429, "fails": 500}[word]
    async with staged(3, streamed=True, policy="lead") as stage:
        await stage.act(0, word)
        assert (stage.sent[0]["status"], stage.upstream.started) == (status, [0])
        assert (stage.record.state, stage.record.status) == ("failed", status)
    assert stage.sibling_limit.in_flight == 0


@pytest.mark.parametrize("policy", ["best", "lead", "greedy"])
@pytest.mark.parametrize("word", ["is too much", "is crowded", "is lost", "breaks", "fails"])
async def test_siblings_without_capacity_do_not_affect_the_app(policy: str, word: str) -> None:
    async with staged(3, policy=policy) as stage:
        await stage.act(1, word)
        await stage.act(2, word)
        await stage.act(0, "answers")
        assert stage.sent[0]["status"] == 200 and stage.body == answer_of(0)
        assert (stage.record.state, stage.record.reason) == ("dropped", "no_group")
        fits = stage.sibling_limit.acquire(5).num
        stage.sibling_limit.release(fits)
    assert fits == (0 if word in ("is too much", "is crowded") else 5)


async def test_a_group_has_a_best_sibling_if_its_lead_is_refused_after_a_quorum() -> None:
    async with staged(4, quorum=2) as stage:
        await stage.act(1, "answers")
        await stage.act(2, "answers")
        await stage.score(0.0, 1.0)
        await stage.act(0, "is refused")
        await stage.act(3, "fails")
        record = stage.record
    assert (record.state, record.served_index, record.best_index) == ("scored", 2, 2)
    assert [sibling.reward for sibling in record.siblings] == [None, 0.0, 1.0, None]


async def test_a_hook_is_not_waited_for_once_the_lead_was_refused() -> None:
    async with staged(3, quorum=2) as stage:
        await stage.act(1, "answers")
        await stage.act(2, "answers")
        assert stage.hook.waiting is not None
        await stage.act(0, "is refused")
        assert stage.sent[0]["status"] == 400 and stage.hook.waiting is None
        assert stage.record.state == "failed"


async def test_a_disconnect_cancels_every_call_and_the_group() -> None:
    async with staged(3, on_disconnect="cancel") as stage:
        await stage.act(1, "answers")
        await stage.leave()
        assert sorted(stage.upstream.ended) == [0, 1, 2] and stage.handler.done()
        assert not stage.sent
        assert (stage.record.state, stage.record.reason) == ("failed", "client_disconnected")
    assert stage.sibling_limit.in_flight == 0


async def test_a_group_whose_app_disconnected_continues_and_chooses_an_answer() -> None:
    async with staged(2) as stage:
        await stage.leave()
        assert not stage.handler.done() and not stage.records
        await stage.act(0, "answers")
        await stage.act(1, "answers")
        await stage.score(0.0, 1.0)
        record = stage.record
    assert (record.state, record.reason, record.status) == ("scored", None, 499)
    assert (record.served_index, record.best_index, record.served_by) == (1, 1, "best")


async def test_a_disconnect_after_the_last_chunk_counts_as_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_executor, "LINGER_S", 30.0)
    async with staged(2, streamed=True, policy="lead") as stage:
        await stage.act(0, "begins")
        await stage.leave()
        await stage.act(0, "answers")
        await stage.act(1, "answers")
        await stage.score(0.0, 1.0)
        assert (stage.record.state, stage.record.served_index) == ("scored", 0)


async def test_a_stop_after_the_answer_drops_the_group_and_records_the_served_sibling() -> None:
    async with staged(2, policy="lead") as stage:
        await stage.act(0, "answers")
        assert stage.is_answered
        stage.run.stop()
        await stage.run.wait_closed()
        record = stage.record
    assert (record.state, record.reason) == ("dropped", "proxy_stopped")
    assert (record.served_index, record.status) == (0, 200)
    assert stage.body == answer_of(0)


async def test_a_stop_does_not_wait_for_the_hook() -> None:
    async with staged(2) as stage:
        await stage.act(0, "answers")
        await stage.act(1, "answers")
        assert stage.hook.waiting is not None
        stage.run.stop()
        await stage.turn()
        assert stage.hook.waiting is None
        assert stage.sent[0]["status"] == 503 and b"stopping" in stage.body
        assert (stage.record.state, stage.record.reason) == ("failed", "proxy_stopped")


async def test_a_bug_after_the_answer_does_not_affect_the_app(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with staged(3, policy="lead") as stage:
        await stage.act(0, "answers")
        monkeypatch.setattr(group_executor, "outcome_of", _broken)
        await stage.act(1, "answers")
        assert stage.body == answer_of(0) and stage.upstream.ended == [0, 1, 2]
        assert (stage.record.state, stage.record.reason) == ("dropped", "internal_error")


async def test_a_bug_before_the_answer_causes_an_internal_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_executor, "outcome_of", _broken)
    async with staged(3) as stage:
        await stage.act(1, "answers")
        assert stage.sent[0]["status"] == 500 and stage.is_answered
        assert (stage.record.state, stage.record.reason) == ("failed", "internal_error")
    assert sorted(stage.upstream.ended) == [0, 1, 2] and stage.sibling_limit.in_flight == 0


def _broken(*_: Any) -> None:
    raise ValueError("a defect")
