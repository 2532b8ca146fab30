"""Leads that are refused by a full engine, and what an app gets in shadow mode."""

from __future__ import annotations

import pytest

from fakevllm_adapters.formats.sse import DONE
from tests.proxy.groups.group_rig import ALIVE, STATUS, answer_of, chunks_of, staged

FULL = pytest.mark.parametrize(("word", "status"), [("is too much", 429), ("is crowded", 503)])


@FULL
@pytest.mark.parametrize("policy", ["best", "lead", "greedy"])
async def test_a_lead_without_capacity_because_of_its_siblings_is_retried_after_one_of_them(
    policy: str, word: str, status: int
) -> None:
    async with staged(3, policy=policy) as stage:
        await stage.act(0, word)
        assert 0 not in stage.upstream.words and not stage.sent
        await stage.act(2, "answers")
        assert 0 in stage.upstream.words and not stage.sent
        await stage.act(0, "answers")
        await stage.act(1, "answers")
        await stage.score(1.0, 0.0, 0.5)
        assert stage.sent[0]["status"] == 200 and stage.body == answer_of(0)
        assert stage.record.state == "scored"


@FULL
@pytest.mark.parametrize("policy", ["lead", "greedy"])
async def test_a_streaming_lead_without_capacity_waits_for_a_sibling_of_another_group(
    policy: str, word: str, status: int
) -> None:
    async with staged(2, streamed=True, policy=policy) as stage:
        with stage.sibling_limit.sampling():
            await stage.act(0, word)
            assert 0 not in stage.upstream.words and not stage.sent
        await stage.turn()
        assert 0 in stage.upstream.words and not stage.sent
        await stage.act(0, "answers")
        assert stage.body == b"".join([ALIVE, *chunks_of(0), DONE])


@FULL
async def test_a_lead_without_capacity_for_another_reason_gets_the_engines_error(
    word: str, status: int
) -> None:
    async with staged(2, streamed=True, policy="lead") as stage:
        await stage.act(0, word)
        assert stage.sent[0]["status"] == status and stage.upstream.started == [0]


@FULL
async def test_a_lead_waits_for_capacity_only_as_long_as_a_request_may_be_held(
    word: str, status: int
) -> None:
    async with staged(2, streamed=True, policy="lead", hold_s=0.0) as stage:
        with stage.sibling_limit.sampling():
            await stage.act(0, word)
            assert stage.sent[0]["status"] == status and b"error" in stage.body


async def test_a_lead_that_waits_for_capacity_ends_with_the_proxy() -> None:
    async with staged(2, streamed=True, policy="lead") as stage:
        with stage.sibling_limit.sampling():
            await stage.act(0, "is too much")
            stage.run.stop()
            await stage.turn()
            assert stage.handler.done() and stage.upstream.started == [0]
        await stage.turn()
        assert stage.upstream.started == [0]


@FULL
@pytest.mark.parametrize("policy", ["best", "lead"])
async def test_a_sibling_is_served_if_the_lead_gets_no_capacity(
    policy: str, word: str, status: int
) -> None:
    async with staged(2, policy=policy) as stage:
        await stage.act(0, word)
        await stage.act(1, "answers")
        await stage.act(0, word)
        assert stage.sent[0]["status"] == 200 and stage.body == answer_of(1)


@FULL
async def test_the_leads_error_is_sent_if_no_sibling_gets_capacity(word: str, status: int) -> None:
    async with staged(2) as stage:
        await stage.act(0, word)
        await stage.act(1, word)
        await stage.act(0, word)
        assert stage.sent[0]["status"] == status
        assert stage.record.reason == f"upstream_{status}"


@pytest.mark.parametrize(
    "word", ["is too much", "is crowded", "is lost", "fails", "is refused", "breaks"]
)
async def test_in_shadow_mode_the_app_gets_the_leads_error_and_no_siblings_answer(
    word: str,
) -> None:
    status = {"breaks": 503} | STATUS
    async with staged(3, policy="lead", shadow=True) as stage:
        await stage.act(0, word)
        assert stage.sent[0]["status"] == status[word] and stage.upstream.started == [0]
        assert (stage.record.state, stage.record.served_index) == ("failed", None)
    assert stage.sibling_limit.in_flight == 0


async def test_in_shadow_mode_siblings_start_after_the_leads_answer_and_are_trained() -> None:
    async with staged(3, policy="lead", shadow=True) as stage:
        await stage.act(0, "answers")
        assert stage.body == answer_of(0) and stage.handler.done()
        assert stage.upstream.started == [0, 1, 2]
        await stage.act(1, "answers")
        await stage.act(2, "fails")
        await stage.score(0.0, 1.0)
        record = stage.record
    assert (record.state, record.served_index, record.best_index) == ("scored", 0, 1)
