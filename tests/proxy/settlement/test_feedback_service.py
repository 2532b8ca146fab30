"""Feedback from the door to the server: kept before it is acknowledged, counted once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fakevllm.ledger.records import FeedbackRecord
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.swarm import EndGroupReply, LogEntry, TrainedGroup
from tests.proxy.ledger.ledger_cases import call, dropped, group, restored
from tests.proxy.odd_swarm import until
from tests.proxy.settlement.feedback_rig import KEY, POOLED, ended, opened, rows, said, until_states


async def test_a_later_feedback_is_sent_once_there_is_another_to_measure_it_by(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, weight=0.5) as (proxy, desk, swarm):
        ended(proxy, "g1", "g2")
        await desk.take(said("g1"), KEY)
        await until_states(proxy, "waiting")
        assert swarm.calls["/add_sample"] == 0
        await desk.take(said("g2", score=0.5), KEY)
        one, other = await until_states(proxy, "pooled", "pooled")
        assert (one.baseline, one.amount, other.baseline, other.amount) == (0.5, 0.25, 1.0, -0.25)
        body = swarm.bodies["/add_sample"]
        assert body["sample_id"] == f"feedback:g2/{other.feedback_id}"
        assert (body["advantage"], body["run_id"]) == (-0.25, "r")
        assert body["calls"] == [call().model_dump()]
        await desk.take(said("g2", score=0.5), KEY)
        await until_states(proxy, "pooled", "pooled")
        assert swarm.calls["/add_sample"] == 2


async def test_the_same_sent_at_once_many_times_is_one_feedback(tmp_path: Path) -> None:
    async with opened(tmp_path) as (proxy, desk, _):
        ended(proxy, "g1")
        taken = await asyncio.gather(*(desk.take(said("g1"), KEY) for _ in range(5)))
        assert sorted(is_repeated for _, is_repeated in taken) == [False] + [True] * 4
        assert len({row.feedback_id for row, _ in taken}) == len(rows(proxy)) == 1


async def test_what_counts_in_its_group_counts_once_however_often_it_is_sent(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path, window_s=1000.0) as (proxy, desk, swarm):
        swarm.answers["/end_group"] = POOLED
        ended(proxy, "g2")
        proxy.delivery.answered("g1", "chatcmpl-1", KEY, None)
        waiting = [asyncio.create_task(desk.take(said("chatcmpl-1"), KEY)) for _ in range(3)]
        await asyncio.gather(*waiting)
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [1.5, 1.0]
        await desk.take(said("g1"), KEY)
        await desk.take(said("g2", thumbs="down"), KEY)
        await until_states(proxy, "joined", "pooled")
        assert swarm.calls["/add_sample"] == swarm.calls["/end_group"] == 1


async def test_who_did_not_get_the_answer_cannot_tell_it_from_none(tmp_path: Path) -> None:
    async with opened(tmp_path) as (proxy, desk, _):
        ended(proxy, "g1")
        told: list[str] = []
        for name, key in (("g1", "other"), ("g1", None), ("none", KEY)):
            with pytest.raises(WireError) as error:
                await desk.take(said(name), key)
            assert error.value.status == 404
            told.append(str(error.value).replace("`none`", "`g1`"))
        assert len(set(told)) == 1 and rows(proxy) == []


async def test_a_word_that_comes_later_replaces_one_that_was_not_used_yet(tmp_path: Path) -> None:
    async with opened(tmp_path, num_for_baseline=3) as (proxy, desk, _):
        ended(proxy, "g1")
        await desk.take(said("g1"), KEY)
        await until_states(proxy, "waiting")
        await desk.take(said("g1", thumbs="down"), KEY)
        first, _ = await until_states(proxy, "kept", "waiting")
        assert first.reason == "replaced"
        await desk.take(said("g1", thumbs=None), KEY)
        *_, last = await until_states(proxy, "kept", "kept", "kept")
        assert last.reason == "taken_back"
        await desk.take(said("g1"), KEY)
        await until_states(proxy, "kept", "kept", "kept", "waiting")


async def test_who_takes_back_what_counts_already_is_told_so(tmp_path: Path) -> None:
    async with opened(tmp_path, window_s=1000.0) as (proxy, desk, swarm):
        swarm.answers["/end_group"] = POOLED
        proxy.delivery.answered("g1", "chatcmpl-1", KEY, None)
        await asyncio.gather(desk.take(said("chatcmpl-1"), KEY))
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await until(lambda: swarm.calls["/end_group"] == 1)
        told = [await desk.take(said("g1", thumbs=None), KEY) for _ in range(2)]
        up, back = rows(proxy)
    assert [is_repeated for _, is_repeated in told] == [False, True]
    assert {row.reason for row, _ in told} == {"too_late: what was said before counts already"}
    assert (up.state, back.state, told[0][0]) == ("joined", "kept", back)


async def test_an_unanimous_app_teaches_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as (proxy, desk, swarm):
        ended(proxy, "g1", "g2")
        for name in ("g1", "g2"):
            await desk.take(said(name), KEY)
        found = await until_states(proxy, "dropped", "dropped")
        assert {row.reason for row in found} == {"same_as_all"}
        assert swarm.calls["/add_sample"] == 0


async def test_an_answer_without_tokens_says_so_and_still_measures_others(tmp_path: Path) -> None:
    async with opened(tmp_path) as (proxy, desk, _):
        proxy.ledger.record(group("g1", [None], state="served"))
        ended(proxy, "g2")
        await desk.take(said("g1"), KEY)
        await desk.take(said("g2", thumbs="down"), KEY)
        row, late = await until_states(proxy, "kept", "pooled")
        assert row.reason == "no_calls: the answer's tokens are not in the ledger"
        assert late.baseline == 1.0


@pytest.mark.parametrize(
    ("answer", "state", "reason"),
    [
        (EndGroupReply(success=False, failure_reason="other_run"), "lost", "other_run"),
        (EndGroupReply(success=True, failure_reason="stale"), "dropped", "stale"),
        (422, "lost", "swarm_refused: 422"),
    ],
)
async def test_what_the_server_does_not_train_says_why(
    tmp_path: Path, answer: object, state: str, reason: str
) -> None:
    async with opened(tmp_path) as (proxy, desk, swarm):
        swarm.answers["/add_sample"] = answer
        ended(proxy, "g1", "g2")
        await desk.take(said("g1"), KEY)
        await desk.take(said("g2", thumbs="down"), KEY)
        found = await until_states(proxy, state, state)
        assert {row.reason for row in found} == {reason}


async def test_a_group_on_its_way_is_waited_for(tmp_path: Path) -> None:
    async with opened(tmp_path) as (proxy, desk, swarm):
        swarm.answers["/end_group"] = EndGroupReply(
            success=True, pooled=True, step=1, run_id="r", calls=[[call()], [call()]]
        )
        ended(proxy, "g2")
        proxy.ledger.record(group("g1", [0.5, 1.0]))
        await desk.take(said("g1"), KEY)
        await desk.take(said("g2", thumbs="down"), KEY)
        await until_states(proxy, "waiting", "pooled")
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await until_states(proxy, "pooled", "pooled")


async def test_what_was_taken_and_not_heard_is_heard_by_the_next_life(tmp_path: Path) -> None:
    async with opened(tmp_path) as (proxy, _, _):
        ended(proxy, "g2")
        proxy.ledger.record(group("g1", [0.5, 1.0]))
        row = FeedbackRecord(
            group_id="g1", feedback_id="a", received_at=1.0, app_key=KEY, thumbs="down"
        )
        proxy.ledger.feedback.record(row)
        assert await proxy.ledger.flush()
    async with opened(tmp_path) as (proxy, _, swarm):
        swarm.answers["/end_group"] = POOLED
        (found,) = await until_states(proxy, "joined")
        assert (found.value, found.amount) == (-1.0, -1.0)
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [-0.5, 1.0]


async def test_the_run_s_log_tells_what_became_of_samples(tmp_path: Path) -> None:
    async with opened(tmp_path) as (proxy, desk, _):
        ended(proxy, "g1", "g2", "g3")
        for name, thumbs in (("g1", "up"), ("g2", "down"), ("g3", "down")):
            await desk.take(said(name, thumbs=thumbs, feedback_id="a"), KEY)
        await until_states(proxy, "pooled", "pooled", "pooled")
        one = TrainedGroup(group_id="feedback:g1/a", siblings=[0])
        step = LogEntry(seq=1, kind="step", step=4, version=5, groups=[one], metrics={"groups": 0})
        gone = dropped(2, **{"feedback:g2/a": "stale"})
        proxy.ledger.apply_log("r", [step, gone, restored(3, "feedback:g3/a")])
        found = await until_states(proxy, "trained", "dropped", "lost")
        assert (found[0].trained_step, found[0].trained_version) == (4, 5)
        assert (found[1].reason, found[2].reason) == ("stale", "server_crashed")


@pytest.mark.parametrize(
    ("metrics", "state", "reason"),
    [({"groups": 0.0}, "dropped", "not_trained"), ({}, "trained", None)],
)
async def test_a_sample_is_trained_where_a_step_had_it_in_its_loss_or_did_not_tell(
    tmp_path: Path, metrics: dict[str, float], state: str, reason: str | None
) -> None:
    """A line that was written anew from a checkpoint tells no metrics."""
    async with opened(tmp_path) as (proxy, desk, _):
        ended(proxy, "g1", "g2")
        for name, thumbs in (("g1", "up"), ("g2", "down")):
            await desk.take(said(name, thumbs=thumbs, feedback_id="a"), KEY)
        await until_states(proxy, "pooled", "pooled")
        one = TrainedGroup(group_id="feedback:g1/a", siblings=[])
        step = LogEntry(seq=1, kind="step", step=4, version=5, groups=[one], metrics=metrics)
        proxy.ledger.apply_log("r", [step])
        found, _ = await until_states(proxy, state, "pooled")
        assert found.reason == reason
