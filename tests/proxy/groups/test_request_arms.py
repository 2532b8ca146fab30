"""Requests get the arm of their session's root."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import orjson
import pytest_asyncio

from fakevllm.gate.arm_policies import ArmPolicies
from fakevllm.groups.group_record import GroupDraft
from fakevllm.groups.request_arms import ADDED_AT_ONCE, MODEL_UNKNOWN, RequestArms
from fakevllm.ledger.store import Ledger
from fakevllm.release.arm_gains import SESSION_IDLE_S, ArmGains, GroupOutcome
from fakevllm.release.arms import Arm, ArmAssigner, Shares
from fakevllm.sessions.client_session_ids import NO_HINTS, Hints
from fakevllm.sessions.request_placement import Placement
from fakevllm.sessions.tree import SessionTree
from fakevllm.sessions.types import PlacedRequest
from fakevllm.statistics.confidence_sequence import RewardRange
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.transport.request import Request
from fakevllm.transport.request_arm import RequestArm
from fakevllm_adapters.formats.base import EngineInfo, Json
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import Task
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.scripted_swarm import ROLLING

SALT = b"salt"
NUM = 40


class Rig:
    """The arms of a proxy whose server cannot be reached, and the proxy's session tree."""

    def __init__(self, ledger: Ledger, link: SwarmLink, shares: Shares) -> None:
        self.ledger, self.link = ledger, link
        self.served: str | None = "m"
        self.tree = SessionTree()
        self.arms = RequestArms(
            ArmAssigner(SALT, shares),
            ArmPolicies(link, {Arm.BASELINE: 0}, ""),
            ArmGains(RewardRange(0.0, 1.0)),
            ledger.arms,
            lambda: self.served,
        )

    def draft(
        self,
        group_id: str,
        messages: list[Json],
        *,
        hints: Hints = NO_HINTS,
        model: str = "m",
        is_placed: bool = True,
    ) -> GroupDraft:
        body: Json = {"model": model, "messages": messages}
        raw, adapter = orjson.dumps(body), ADAPTERS["chat"]
        exchange = adapter.open(body, EngineInfo())
        request = Request(group_id, adapter, raw, raw, exchange, {}, model=model)
        placement = Placement(self.tree, group_id, "", body, "", hints, time.monotonic())
        return GroupDraft(request, Task(), "", None, placement=placement if is_placed else None)

    def assign(self, draft: GroupDraft) -> RequestArm:
        self.arms.assign(draft)
        assert draft.request.arm is not None
        return draft.request.arm


def user(text: str) -> Json:
    return {"role": "user", "content": text}


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig]:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    link = SwarmLink("http://127.0.0.1:9", None, TrainJob(), ledger)
    yield Rig(ledger, link, Shares.continuous(0.5))
    await link.close()
    ledger.close()


async def test_a_later_turn_and_a_fork_have_the_arm_of_the_session_also_after_a_restart(
    rig: Rig,
) -> None:
    restored = SessionTree()
    arms: dict[int, RequestArm] = {}
    answer = {"role": "assistant", "content": "An answer."}
    for number in range(NUM):
        first = rig.draft(f"first {number}", [user(f"Question {number}?")])
        arms[number] = rig.assign(first)
        assert first.placement is not None
        first.placement.served(answer, time.monotonic(), None)
        place = first.place()
        assert place is not None
        placed = PlacedRequest(
            group_id=f"first {number}",
            scope="",
            place=place,
            received_at=time.time(),
            message_json=orjson.dumps(answer).decode(),
        )
        restored.restore([placed], now=time.monotonic(), unix_now=time.time())
    for tree in (rig.tree, restored):
        rig.tree = tree
        for number in range(NUM):
            for name in ("turn", "fork"):
                messages = [user(f"Question {number}?"), answer, user(name)]
                later = rig.assign(rig.draft(f"{name} {number} {id(tree)}", messages))
                assert (later.root, later.arm) == (arms[number].root, arms[number].arm)
    assert {one.arm for one in arms.values()} == {Arm.TRAINING, Arm.BASELINE}


async def test_sub_agents_have_the_arm_of_the_session_that_started_them(rig: Rig) -> None:
    for number in range(NUM):
        main, sub, deep = (f"{name} {number}" for name in ("main", "sub", "deep"))
        hints = [Hints(session=main), Hints(session=sub, parent=main)]
        hints.append(Hints(session=deep, parent=sub))
        roots = {
            rig.assign(rig.draft(f"{number} {at}", [user(f"{number} {at}")], hints=one)).root
            for at, one in enumerate(hints)
        }
        assert len(roots) == 1


async def test_a_request_without_a_place_is_a_session_of_its_own(rig: Rig) -> None:
    arms = [rig.assign(rig.draft(str(n), [user("hi")], is_placed=False)) for n in range(NUM)]
    assert [arm.root for arm in arms] == [str(n) for n in range(NUM)]
    assert {arm.arm for arm in arms} == {Arm.TRAINING, Arm.BASELINE}


async def test_a_request_that_cannot_be_parsed_has_no_arm(rig: Rig) -> None:
    draft = rig.draft("g", [user("hi")])
    draft.request.exchange = None
    rig.arms.assign(draft)
    assert draft.request.arm is None


async def test_only_the_answers_of_a_policy_are_renamed(rig: Rig) -> None:
    raw = b'{"model": "policy-0", "choices": [{"message": {}}]}'
    for number in range(NUM):
        draft = rig.draft(str(number), [user(f"{number}")])
        arm = rig.assign(draft)
        exchange = draft.request.exchange
        assert exchange is not None
        is_renamed = exchange.answer(raw) == raw.replace(b"policy-0", b"m")
        assert is_renamed == (arm.arm is Arm.BASELINE)
        assert arm.policy == ("policy-0" if is_renamed else None)


async def test_while_the_model_is_unknown_the_served_weights_answer(rig: Rig) -> None:
    rig.served = None
    arms = [rig.assign(rig.draft(str(n), [user(str(n))], model="")) for n in range(NUM)]
    baseline = [arm for arm in arms if arm.arm is Arm.BASELINE]
    assert baseline and {arm.trouble for arm in baseline} == {MODEL_UNKNOWN}
    assert {arm.answering for arm in baseline} == {Arm.TRAINING}


async def test_a_server_that_cannot_be_reached_does_not_fail_a_request(rig: Rig) -> None:
    rig.link.status = ROLLING
    drafts = [rig.draft(str(n), [user(str(n))]) for n in range(NUM)]
    for draft in drafts:
        rig.assign(draft)
        await rig.arms.prepare(draft.request)
    baseline = [draft.request for draft in drafts if not draft.request.is_captured]
    assert baseline and all(one.arm is not None and one.arm.trouble for one in baseline)
    assert {one.arm.policy for one in baseline if one.arm is not None} == {None}
    await rig.arms.policies.close()


async def test_a_request_that_waits_for_the_engine_keeps_the_version_of_its_arm(rig: Rig) -> None:
    drafts = [rig.draft(str(n), [user(str(n))]) for n in range(NUM)]
    for draft in drafts:
        rig.assign(draft)
        await rig.arms.prepare(draft.request)
    baseline = [draft.request.arm for draft in drafts if not draft.request.is_captured]
    assert {(arm.policy, arm.trouble) for arm in baseline if arm is not None} == {
        ("policy-0", None)
    }


async def test_answers_of_the_served_weights_in_place_of_a_policy_are_not_renamed(rig: Rig) -> None:
    raw = b'{"model": "policy-0", "choices": [{"message": {}}]}'
    for number in range(NUM):
        draft = rig.draft(str(number), [user(f"{number}")])
        arm, exchange = rig.assign(draft), draft.request.exchange
        assert exchange is not None and draft.request.has_native_route
        if arm.policy is not None:
            assert exchange.answer(raw) != raw
            arm.use_served_weights("gone")
            assert exchange.answer(raw) == raw


async def test_groups_of_a_replaced_version_are_not_compared(rig: Rig) -> None:
    outcomes: list[GroupOutcome] = []
    rig.arms.on_outcome = outcomes.append

    def end(draft: GroupDraft) -> None:
        arm, name = rig.assign(draft), draft.request.id
        record = replace(group(name), arm=arm.arm.value, arm_propensity=arm.propensity)
        if draft is drafts[-1]:
            rig.arms.policies.set_version(Arm.BASELINE, 3)
        rig.arms.group_ended(draft.request, record)

    drafts = [rig.draft(str(n), [user(str(n))]) for n in range(NUM)]
    drafts = [one for one in drafts if rig.assign(one).arm is Arm.BASELINE]
    for draft in drafts:
        end(draft)
    assert [one.root for one in outcomes] == [
        one.request.arm.root for one in drafts[:-1] if one.request.arm is not None
    ]
    await rig.arms.policies.close()


async def test_other_tasks_run_while_earlier_groups_are_counted(rig: Rig) -> None:
    at = time.time() - 2 * SESSION_IDLE_S
    num = 3 * ADDED_AT_ONCE
    for number in range(num):
        record = group(str(number), [0.0, 1.0], served=1, received_at=at)
        rig.ledger.record(replace(record, arm="training", arm_propensity=0.5))
    assert await rig.ledger.flush()
    rig = Rig(rig.ledger, rig.link, Shares.continuous(0.5))
    reading = asyncio.create_task(rig.arms.read_earlier())
    counted = list[int]()
    while not reading.done():
        summary = rig.arms.summary()
        counted.append(summary.num_open + sum(summary.sessions.values()))
        assert not summary.sessions  # no session is counted too early
        await asyncio.sleep(0)
    assert set(counted) >= {0, ADDED_AT_ONCE, 2 * ADDED_AT_ONCE}
    assert rig.arms.summary().sessions == {Arm.TRAINING: num}


async def test_groups_of_earlier_processes_and_of_this_one_count_once(
    tmp_path: Path, rig: Rig
) -> None:
    def ended(name: str) -> None:
        draft = rig.draft(name, [user(name)])
        arm = rig.assign(draft)
        at = time.time() - 2 * SESSION_IDLE_S
        record = group(name, [0.0, 1.0], served=1, received_at=at)
        record = replace(record, arm=arm.arm.value, arm_propensity=arm.propensity)
        rig.ledger.record(replace(record, session_id=name))
        rig.arms.group_ended(draft.request, record)

    for number in range(NUM):
        ended(f"before {number}")
    assert await rig.ledger.flush()
    link = SwarmLink("http://127.0.0.1:9", None, TrainJob(), rig.ledger)
    rig = Rig(rig.ledger, link, Shares.continuous(0.5))
    ended("while the ledger is not read")
    await rig.arms.read_earlier()
    ended("afterwards")
    summary = rig.arms.summary()
    assert sum(summary.sessions.values()) == NUM + 2
    assert summary.policy is not None and summary.policy.mean == 0.0
    assert summary.choice is not None and summary.choice.mean == 0.5
    await link.close()
