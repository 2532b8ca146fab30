"""Feedback from the route to the server: it is stored before the reply, and counts once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from fakevllm.ledger.records import FeedbackRecord
from fakevllm_adapters.protocol.errors import WireError
from fakevllm_adapters.protocol.swarm import EndGroupReply, LogEntry, TrainedGroup
from tests.proxy.ledger.ledger_cases import call, dropped, group, restored
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


async def test_late_feedback_is_sent_once_there_is_a_baseline(
    tmp_path: Path,
) -> None:
    async with open_feedback_proxy(tmp_path, weight=0.5) as (proxy, service, swarm):
        record_pooled(proxy, "g1", "g2")
        await service.accept(feedback_on("g1"), KEY)
        await until_states(proxy, "waiting")
        assert swarm.calls["/add_sample"] == 0
        await service.accept(feedback_on("g2", score=0.5), KEY)
        one, other = await until_states(proxy, "pooled", "pooled")
        assert (one.baseline, one.amount, other.baseline, other.amount) == (0.5, 0.25, 1.0, -0.25)
        body = swarm.bodies["/add_sample"]
        assert body["sample_id"] == f"feedback:g2/{other.feedback_id}"
        assert (body["advantage"], body["run_id"]) == (-0.25, "r")
        assert body["calls"] == [call().model_dump()]
        await service.accept(feedback_on("g2", score=0.5), KEY)
        await until_states(proxy, "pooled", "pooled")
        assert swarm.calls["/add_sample"] == 2


async def test_equal_feedback_sent_many_times_at_once_is_stored_once(tmp_path: Path) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, _):
        record_pooled(proxy, "g1")
        replies = await asyncio.gather(*(service.accept(feedback_on("g1"), KEY) for _ in range(5)))
        assert sorted(is_repeated for _, is_repeated in replies) == [False] + [True] * 4
        assert len({row.feedback_id for row, _ in replies}) == len(rows(proxy)) == 1


async def test_feedback_that_is_sent_repeatedly_is_added_to_its_group_once(
    tmp_path: Path,
) -> None:
    async with open_feedback_proxy(tmp_path, window_s=1000.0) as (proxy, service, swarm):
        swarm.answers["/end_group"] = POOLED
        record_pooled(proxy, "g2")
        proxy.delivery.register_answer("g1", "chatcmpl-1", KEY, None)
        waiting = [
            asyncio.create_task(service.accept(feedback_on("chatcmpl-1"), KEY)) for _ in range(3)
        ]
        await asyncio.gather(*waiting)
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [1.5, 1.0]
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        await until_states(proxy, "joined", "pooled")
        assert swarm.calls["/add_sample"] == swarm.calls["/end_group"] == 1


async def test_an_app_cannot_tell_another_apps_answer_from_one_that_does_not_exist(
    tmp_path: Path,
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, _):
        record_pooled(proxy, "g1")
        messages: list[str] = []
        for name, key in (("g1", "other"), ("g1", None), ("none", KEY)):
            with pytest.raises(WireError) as error:
                await service.accept(feedback_on(name), key)
            assert error.value.status == 404
            messages.append(str(error.value).replace("`none`", "`g1`"))
        assert len(set(messages)) == 1 and rows(proxy) == []


async def test_later_feedback_replaces_feedback_that_was_not_used_yet(tmp_path: Path) -> None:
    async with open_feedback_proxy(tmp_path, num_for_baseline=3) as (proxy, service, _):
        record_pooled(proxy, "g1")
        await service.accept(feedback_on("g1"), KEY)
        await until_states(proxy, "waiting")
        await service.accept(feedback_on("g1", thumbs="down"), KEY)
        first, _ = await until_states(proxy, "kept", "waiting")
        assert first.reason == "replaced"
        await service.accept(feedback_on("g1", thumbs=None), KEY)
        *_, last = await until_states(proxy, "kept", "kept", "kept")
        assert last.reason == "taken_back"
        await service.accept(feedback_on("g1"), KEY)
        await until_states(proxy, "kept", "kept", "kept", "waiting")


async def test_a_withdrawal_of_used_feedback_gets_the_reason_too_late(tmp_path: Path) -> None:
    async with open_feedback_proxy(tmp_path, window_s=1000.0) as (proxy, service, swarm):
        swarm.answers["/end_group"] = POOLED
        proxy.delivery.register_answer("g1", "chatcmpl-1", KEY, None)
        await asyncio.gather(service.accept(feedback_on("chatcmpl-1"), KEY))
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await until(lambda: swarm.calls["/end_group"] == 1)
        replies = [await service.accept(feedback_on("g1", thumbs=None), KEY) for _ in range(2)]
        up, back = rows(proxy)
    assert [is_repeated for _, is_repeated in replies] == [False, True]
    assert {row.reason for row, _ in replies} == {"too_late: earlier feedback counts already"}
    assert (up.state, back.state, replies[0][0]) == ("joined", "kept", back)


async def test_feedback_that_equals_its_baseline_is_dropped(tmp_path: Path) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, swarm):
        record_pooled(proxy, "g1", "g2")
        for name in ("g1", "g2"):
            await service.accept(feedback_on(name), KEY)
        found = await until_states(proxy, "dropped", "dropped")
        assert {row.reason for row in found} == {"same_as_all"}
        assert swarm.calls["/add_sample"] == 0


async def test_feedback_on_an_answer_without_tokens_is_kept_and_counts_in_the_baseline(
    tmp_path: Path,
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, _):
        proxy.ledger.record(group("g1", [None], state="served"))
        record_pooled(proxy, "g2")
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
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
async def test_a_sample_that_the_server_does_not_train_has_the_servers_reason(
    tmp_path: Path, answer: object, state: str, reason: str
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, swarm):
        swarm.answers["/add_sample"] = answer
        record_pooled(proxy, "g1", "g2")
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        found = await until_states(proxy, state, state)
        assert {row.reason for row in found} == {reason}


async def test_late_feedback_waits_until_its_group_is_settled(tmp_path: Path) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, swarm):
        swarm.answers["/end_group"] = EndGroupReply(
            success=True, pooled=True, step=1, run_id="r", calls=[[call()], [call()]]
        )
        record_pooled(proxy, "g2")
        proxy.ledger.record(group("g1", [0.5, 1.0]))
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        await until_states(proxy, "waiting", "pooled")
        proxy.delivery.settle(group("g1", [0.5, 1.0]))
        await until_states(proxy, "pooled", "pooled")


async def test_stored_feedback_that_was_not_processed_is_processed_after_a_restart(
    tmp_path: Path,
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, _, _):
        record_pooled(proxy, "g2")
        proxy.ledger.record(group("g1", [0.5, 1.0]))
        row = FeedbackRecord(
            group_id="g1", feedback_id="a", received_at=1.0, app_key=KEY, thumbs="down"
        )
        proxy.ledger.feedback.record(row)
        assert await proxy.ledger.flush()
    async with open_feedback_proxy(tmp_path) as (proxy, _, swarm):
        swarm.answers["/end_group"] = POOLED
        (found,) = await until_states(proxy, "joined")
        assert (found.value, found.amount) == (-1.0, -1.0)
        await until(lambda: swarm.calls["/end_group"] == 1)
        assert swarm.bodies["/end_group"]["rewards"] == [-0.5, 1.0]


async def test_late_feedback_about_a_row_that_was_held_out_later_is_kept_and_not_trained(
    tmp_path: Path,
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "What is 2 plus 5?"}\n')
    async with open_feedback_proxy(tmp_path, eval_dataset=held_out) as (proxy, service, swarm):
        record_pooled(proxy, "g2")
        proxy.ledger.record(replace(group("g1"), question="what is 2 plus 5?"))
        proxy.ledger.settle("g1", "pooled", None, 1, [[call()], [call()]], "r")
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        found, _ = await until_states(proxy, "kept", "pooled")
        assert found.reason == "held_out"
        assert swarm.calls["/add_sample"] == 1


async def test_late_feedback_about_a_text_that_is_redacted_now_is_kept_and_not_trained(
    tmp_path: Path,
) -> None:
    secret = '{"messages":[{"role":"user","content":"I am ada@example.org."}]}'
    async with open_feedback_proxy(tmp_path) as (proxy, _, _):
        record_pooled(proxy, "g2")
        proxy.ledger.record(replace(group("g1"), request_json=secret))
        proxy.ledger.settle("g1", "pooled", None, 1, [[call()], [call()]], "r")
        assert await proxy.ledger.flush()
    async with open_feedback_proxy(tmp_path, redact=["email"]) as (proxy, service, swarm):
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        found, _ = await until_states(proxy, "kept", "pooled")
        assert found.reason == "redacted"
        assert swarm.calls["/add_sample"] == 1


async def test_the_run_log_sets_the_state_of_samples(tmp_path: Path) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, _):
        record_pooled(proxy, "g1", "g2", "g3")
        for name, thumbs in (("g1", "up"), ("g2", "down"), ("g3", "down")):
            await service.accept(feedback_on(name, thumbs=thumbs, feedback_id="a"), KEY)
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
async def test_a_sample_counts_as_trained_unless_the_step_reports_that_it_was_not_in_the_loss(
    tmp_path: Path, metrics: dict[str, float], state: str, reason: str | None
) -> None:
    """A log line that was rebuilt from a checkpoint has no metrics."""
    async with open_feedback_proxy(tmp_path) as (proxy, service, _):
        record_pooled(proxy, "g1", "g2")
        for name, thumbs in (("g1", "up"), ("g2", "down")):
            await service.accept(feedback_on(name, thumbs=thumbs, feedback_id="a"), KEY)
        await until_states(proxy, "pooled", "pooled")
        one = TrainedGroup(group_id="feedback:g1/a", siblings=[])
        step = LogEntry(seq=1, kind="step", step=4, version=5, groups=[one], metrics=metrics)
        proxy.ledger.apply_log("r", [step])
        found, _ = await until_states(proxy, state, "pooled")
        assert found.reason == reason


@pytest.mark.parametrize("arm", ["baseline", "released"])
async def test_late_feedback_about_an_answer_of_another_arm_is_kept_and_not_trained(
    tmp_path: Path, arm: str
) -> None:
    async with open_feedback_proxy(tmp_path) as (proxy, service, swarm):
        record_pooled(proxy, "g2")
        proxy.ledger.record(replace(group("g1", state="served"), arm=arm, arm_propensity=0.5))
        # Even if the ledger had the answer's tokens, they would not be trained.
        proxy.ledger.settle("g1", "served", "other_arm", None, [[call()], [call()]], "r")
        await service.accept(feedback_on("g1"), KEY)
        await service.accept(feedback_on("g2", thumbs="down"), KEY)
        found, _ = await until_states(proxy, "kept", "waiting")
        assert (found.reason, found.value) == ("other_arm", 1.0)
        assert swarm.calls["/add_sample"] == 0
        record_pooled(proxy, "g3")
        await service.accept(feedback_on("g3"), KEY)
        await until_states(proxy, "kept", "pooled", "pooled")
        assert swarm.calls["/add_sample"] == 2
