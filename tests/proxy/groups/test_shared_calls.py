"""Siblings that share one call to the engine."""

from __future__ import annotations

import pytest

from fakevllm_adapters.formats.sse import DONE
from tests.proxy.groups.group_rig import answer_of, chunks_of, staged


async def test_the_lead_has_a_call_of_its_own_and_the_siblings_share_one() -> None:
    async with staged(4, shares=True) as stage:
        assert stage.upstream.calls == [(0,), (1, 2, 3)]
        assert "n" not in stage.upstream.bodies[0] and stage.upstream.bodies[1]["n"] == 3
        for index in (3, 0, 1, 2):
            assert not stage.sent
            await stage.act(index, "answers")
        await stage.score(0.0, 1.0, 0.5, 0.2)
        assert stage.body == answer_of(1)
        assert [sibling.status for sibling in stage.record.siblings] == [200] * 4
    assert stage.sibling_limit.in_flight == 0


async def test_a_relayed_lead_starts_the_shared_call_with_its_first_token() -> None:
    async with staged(3, streamed=True, policy="lead", shares=True) as stage:
        assert stage.upstream.calls == [(0,)]
        await stage.act(0, "begins")
        assert stage.upstream.calls == [(0,), (1, 2)]
        await stage.act(2, "answers")
        await stage.act(0, "answers")
        assert stage.is_answered and not stage.records
        await stage.act(1, "answers")
        await stage.score(0.0, 1.0, 0.5)
        assert (stage.record.served_index, stage.record.best_index) == (0, 1)


async def test_a_streamed_answer_of_a_shared_call_is_sent_unchanged() -> None:
    async with staged(3, streamed=True, shares=True) as stage:
        for index in range(3):
            await stage.act(index, "answers")
        await stage.score(0.0, 0.5, 1.0)
        assert stage.body == b"".join([*chunks_of(2), DONE])


async def test_a_quorum_of_a_shared_call_is_served_before_its_other_siblings_are_complete() -> None:
    async with staged(4, quorum=2, shares=True) as stage:
        await stage.act(3, "answers")
        await stage.act(1, "answers")
        await stage.score(0.0, 1.0)
        assert stage.body == answer_of(3) and not stage.records
        await stage.act(2, "answers")
        await stage.act(0, "answers")
        await stage.score(0.1, 0.2, 0.3, 0.4)
        assert (stage.record.served_index, stage.record.best_index) == (3, 3)


async def test_at_the_deadline_the_complete_siblings_of_a_shared_call_count() -> None:
    async with staged(4, shares=True) as stage:
        await stage.act(2, "answers")
        await stage.act(3, "answers")
        stage.run.pass_deadline()
        await stage.turn()
        await stage.score(0.0, 1.0)
        assert stage.body == answer_of(3)


@pytest.mark.parametrize("word", ["breaks", "is cut", "drops", "garbles"])
async def test_a_broken_call_fails_only_the_siblings_that_were_not_complete(word: str) -> None:
    async with staged(4, shares=True) as stage:
        await stage.act(2, "answers")
        await stage.act(1, word)
        await stage.act(0, "answers")
        await stage.score(0.0, 1.0)  # the app does not wait for an outage to pass
        assert stage.body == answer_of(2)
        rows = stage.record.siblings
        assert [row.status for row in rows] == [200, 503, 200, 503]
        assert stage.upstream.calls == [(0,), (1, 2, 3)]
    assert stage.sibling_limit.in_flight == 0


@pytest.mark.parametrize("word", ["is crowded", "is too much"])
async def test_a_busy_engine_that_refuses_the_shared_call_lowers_the_limit(word: str) -> None:
    async with staged(4, shares=True) as stage:
        await stage.act(1, word)
        await stage.act(0, "answers")
        assert stage.body == answer_of(0)
        assert (stage.record.state, stage.record.reason) == ("dropped", "no_group")
        assert stage.sibling_limit.acquire(5).num == 0


@pytest.mark.parametrize("word", ["breaks", "is lost", "fails"])
async def test_a_call_that_fails_before_the_first_answer_fails_all_its_siblings(word: str) -> None:
    async with staged(4, shares=True) as stage:
        await stage.act(2, word)
        await stage.act(0, "answers")
        assert stage.body == answer_of(0) and stage.upstream.calls == [(0,), (1, 2, 3)]
        status = 500 if word == "fails" else 503
        assert [row.status for row in stage.record.siblings] == [200, *[status] * 3]
    assert stage.sibling_limit.in_flight == 0


async def test_siblings_whose_shared_call_is_refused_have_calls_of_their_own() -> None:
    async with staged(3) as stage:  # the engine refuses `n`
        assert stage.upstream.calls == [(0,), (1,), (2,)]
        for index in range(3):
            await stage.act(index, "answers")
        await stage.score(0.0, 1.0, 0.5)
        assert stage.body == answer_of(1) and stage.record.state == "scored"


async def test_a_disconnect_cancels_the_shared_call() -> None:
    async with staged(4, on_disconnect="cancel", shares=True) as stage:
        await stage.act(1, "answers")
        await stage.leave()
        assert sorted(stage.upstream.ended) == [0, 1, 2, 3] and stage.handler.done()
        assert stage.record.reason == "client_disconnected"
    assert stage.sibling_limit.in_flight == 0


async def test_a_refused_lead_cancels_the_shared_call() -> None:
    async with staged(4, shares=True) as stage:
        await stage.act(0, "is refused")
        assert stage.sent[0]["status"] == 400
        assert sorted(stage.upstream.ended) == [0, 1, 2, 3]


async def test_each_complete_sibling_gives_its_capacity_back() -> None:
    async with staged(4, shares=True) as stage:
        slots = stage.run._services.sampler.retry_handler.slots  # pyright: ignore[reportPrivateUsage]
        assert (slots.num_open, stage.sibling_limit.in_flight) == (4, 3)
        await stage.act(1, "answers")
        await stage.act(3, "answers")
        assert (slots.num_open, stage.sibling_limit.in_flight) == (2, 1)


async def test_the_app_sees_the_request_id_that_it_chose() -> None:
    async with staged(3, headers={"X-Request-Id": "mine"}, shares=True) as stage:
        assert stage.upstream.headers[1]["X-Request-Id"] == "mine-1"
        for index in range(3):
            await stage.act(index, "answers")
        await stage.score(0.0, 0.5, 1.0)
        assert stage.is_answered
