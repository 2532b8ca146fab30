"""Lockstep: groups run one after another, each after the previous version was published."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from fakevllm.config.model import load
from fakevllm.demo.command import run_demo
from fakevllm.demo.run_state import DemoSettings
from fakevllm.errors import ConfigError, UserError
from fakevllm.groups.reproducible_lockstep import Lockstep, is_idle, seed_of
from fakevllm.ledger.store import Ledger
from fakevllm.replay.command import ReplaySettings
from fakevllm.replay.proxy_queries import require_lockstep
from fakevllm.runtime.local_engines import EngineChoice
from fakevllm.settlement.reward_delivery import Delivery
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm.transport.request import Request, SiblingPlan
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EndGroupReply, EngineStatus, EngineStatusReply, Task
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.scripted_swarm import ROLLING, ScriptedSwarm, until

ROW = Task(task_id="row", main_query="What is 1 plus 2?")
DUE = ROLLING.model_copy(update={"backlog": 1.0})
SYNCING = ROLLING.model_copy(update={"engine_status": EngineStatus.WEIGHT_SYNCING})
POOLED = EndGroupReply(success=True, pooled=True, step=1)
JOB = TrainJob(lockstep=True)


@dataclass(frozen=True, slots=True)
class Rig:
    swarm: ScriptedSwarm
    delivery: Delivery
    lockstep: Lockstep


@asynccontextmanager
async def rig(folder: Path, run_seed: int = 0) -> AsyncGenerator[Rig]:
    ledger = Ledger.open(folder / "ledger.sqlite")
    async with ScriptedSwarm() as swarm:
        swarm.answers |= {"/end_group": POOLED}
        link = SwarmLink(swarm.url, None, JOB, ledger)
        following = asyncio.create_task(link.run())
        delivery = Delivery(ledger, link)
        await link.reached.wait()
        yield Rig(swarm, delivery, Lockstep(run_seed, delivery, link))
        await delivery.close()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await link.close()
    ledger.close()


async def seeds_of(one: Lockstep, *tasks: Task) -> list[int]:
    seeds: list[int] = []
    for task in tasks:
        async with one.slot(task, is_group=True) as seed:
            seeds.append(seed)
    return seeds


async def test_a_seed_depends_on_the_run_the_row_and_the_number_of_its_requests(
    tmp_path: Path,
) -> None:
    other = Task(task_id="other")
    async with rig(tmp_path) as one:
        seeds = await seeds_of(one.lockstep, ROW, other, ROW)
    assert seeds == [seed_of(0, "row", 0), seed_of(0, "other", 0), seed_of(0, "row", 1)]
    assert len({*seeds, seed_of(1, "row", 0)}) == 4


async def test_a_request_without_a_task_is_identified_by_its_question(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        seeds = await seeds_of(one.lockstep, Task(main_query="half a \ud800"), Task(main_query="b"))
    assert len(set(seeds)) == 2


@pytest.mark.parametrize("busy", [DUE, SYNCING])
async def test_a_request_waits_until_the_version_is_published(
    tmp_path: Path, busy: EngineStatusReply
) -> None:
    async with rig(tmp_path) as one:
        one.swarm.answers["/get_engine_status"] = busy
        asked_before = one.swarm.calls["/get_engine_status"]
        waiting = asyncio.create_task(seeds_of(one.lockstep, ROW))
        await until(lambda: one.swarm.calls["/get_engine_status"] > asked_before + 5)
        assert not waiting.done()
        one.swarm.answers["/get_engine_status"] = ROLLING
        await waiting


async def test_a_group_begins_when_the_server_has_accepted_the_previous_one(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        one.swarm.answers["/end_group"] = 503
        async with one.lockstep.slot(ROW, is_group=True):
            one.delivery.settle(group("first", [1.0, 0.0]))
        await until(lambda: one.swarm.calls["/end_group"] > 0)
        waiting = asyncio.create_task(seeds_of(one.lockstep, ROW))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        one.swarm.answers["/end_group"] = POOLED
        await waiting
        assert one.delivery.num_unsettled == 0


async def test_one_group_is_open_at_a_time_and_requests_that_are_only_served_do_not_wait(
    tmp_path: Path,
) -> None:
    async with rig(tmp_path) as one:
        async with one.lockstep.slot(ROW, is_group=True) as seed:
            second = asyncio.create_task(seeds_of(one.lockstep, ROW))
            async with one.lockstep.slot(ROW, is_group=False) as served:
                pass
            await asyncio.wait([second], timeout=0.05)
            assert not second.done()
        assert len({seed, served, *await second}) == 3


async def test_no_request_waits_for_an_unreachable_server(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        one.swarm.answers |= {"/end_group": 503, "/get_engine_status": 503}
        one.delivery.settle(group("first", [1.0, 0.0]))
        assert len(await seeds_of(one.lockstep, ROW)) == 1
        assert one.delivery.num_unsettled == 1
        one.swarm.answers |= {"/end_group": POOLED, "/get_engine_status": ROLLING}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (None, True),
        (ROLLING, True),
        (DUE, False),
        (SYNCING, False),
        (DUE.model_copy(update={"engine_status": EngineStatus.ROLLING_POST}), False),
        (DUE.model_copy(update={"engine_status": EngineStatus.OFFLINE}), True),
        (DUE.model_copy(update={"engine_status": EngineStatus.BOOTING}), True),
    ],
)
def test_a_running_or_due_step_is_waited_for(
    status: EngineStatusReply | None, expected: bool
) -> None:
    assert is_idle(status) is expected


# --- seeds in bodies


def make_request(**fields: Any) -> Request:
    adapter = ADAPTERS["chat"]
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | fields
    raw = orjson.dumps(body)
    return Request("r", adapter, raw, raw, adapter.open(body, EngineInfo()), {})


def seeds_sent(plan: SiblingPlan, request: Request) -> list[int | None]:
    bodies = [orjson.loads(plan.body(request, index, 1.0)) for index in range(plan.num)]
    return [body.get("seed") for body in bodies]


def test_siblings_count_up_from_the_leads_seed() -> None:
    assert seeds_sent(SiblingPlan(3, seed=40), make_request()) == [40, 41, 42]
    assert seeds_sent(SiblingPlan(3, is_greedy=True, seed=40), make_request()) == [40, 41, 42]
    assert seeds_sent(SiblingPlan(3), make_request()) == [None, None, None]


def test_an_apps_own_seed_is_kept() -> None:
    assert seeds_sent(SiblingPlan(3, seed=40), make_request(seed=7)) == [7, 8, 9]


def test_a_request_served_once_gets_a_seed_and_keeps_its_other_bytes() -> None:
    request = make_request(temperature=0.5)
    assert orjson.loads(
        SiblingPlan(1, seed=40).lead_request(request).upstream_body
    ) == request.body | {"seed": 40}
    assert SiblingPlan(1).lead_request(request) is request


def test_a_body_that_cannot_be_parsed_is_passed_on_unchanged() -> None:
    odd = Request("r", ADAPTERS["chat"], b"{odd", b"{odd", None, {})
    assert SiblingPlan(1, seed=40).lead_request(odd).upstream_body == b"{odd"


# --- what cannot be in lockstep


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[serve]\npolicy = "lead"\n', "serve.policy"),
        ('[serve.routes.chat]\npolicy = "greedy"\n', "serve.policy"),
        ("[serve]\nquorum = 2\n", "serve.quorum"),
        ("[serve.routes.chat]\ndeadline_s = 2\n", "serve.deadline_s"),
        ("[policy]\nshadow = true\n", "policy.shadow"),
        ("[policy]\nsample_fraction = 0.5\n", "policy.sample_fraction"),
        ("[feedback]\nwindow_s = 1\n", "feedback.window_s"),
        ('[fallback]\nurl = "http://other"\n', "fallback.url"),
    ],
)
def test_a_setting_with_random_effects_is_refused_by_name(
    tmp_path: Path, text: str, named: str
) -> None:
    file = tmp_path / "fakevllm.toml"
    file.write_text(text)
    load(file, {})
    with pytest.raises(ConfigError, match=rf"{named}.* does not go with job.lockstep.*\.$"):
        load(file, {"job": {"lockstep": True}})


def test_a_demo_in_lockstep_needs_the_embedded_engine(tmp_path: Path) -> None:
    settings = DemoSettings(
        2, 0, "none", tmp_path, None, EngineChoice.resolve("vllm"), lockstep=True
    )
    with pytest.raises(UserError, match="--lockstep is for the embedded engine"):
        run_demo(settings)


def test_a_run_cannot_be_resumed_in_another_mode(tmp_path: Path) -> None:
    (tmp_path / "fakevllm.toml").write_text("[job]\nlockstep = true\n")
    fake = EngineChoice.resolve("fake")
    with pytest.raises(UserError, match="a run with --control none --lockstep: resume it"):
        run_demo(DemoSettings(2, 0, "none", tmp_path, None, fake))


@pytest.mark.parametrize("status", [None, ROLLING])
async def test_a_replay_in_lockstep_needs_a_proxy_in_lockstep(
    status: EngineStatusReply | None,
) -> None:
    async with ScriptedSwarm() as proxy:
        proxy.answers["/fakevllm/engine"] = status
        with pytest.raises(ConfigError, match=r"does not run in lockstep: .* with --lockstep"):
            await require_lockstep(f"{proxy.url}/v1", "sk-1")
        proxy.answers["/fakevllm/engine"] = ROLLING.model_copy(update={"lockstep": True})
        await require_lockstep(f"{proxy.url}/v1", "sk-1")
        assert proxy.headers["/fakevllm/engine"]["Authorization"] == "Bearer sk-1"
    with pytest.raises(ConfigError, match="No fakevllm proxy answers"):
        await require_lockstep("http://127.0.0.1:9/v1")


@pytest.mark.parametrize(("job", "expected"), [(JOB, True), (TrainJob(), False)])
async def test_a_proxy_is_in_lockstep_only_if_its_server_is(
    tmp_path: Path, job: TrainJob, expected: bool
) -> None:
    ledger = Ledger.open(tmp_path / "ledger.sqlite")
    link = SwarmLink("http://127.0.0.1:9", None, job, ledger)
    link.status = ROLLING.model_copy(update={"lockstep": True})
    assert link.status is not None and link.status.lockstep is expected
    link.status = ROLLING
    assert not link.status.lockstep
    await link.close()
    ledger.close()


@pytest.mark.parametrize(
    ("lockstep", "concurrency", "expected"), [(False, None, 8), (False, 3, 3), (True, None, 1)]
)
def test_rows_are_replayed_sequentially_in_lockstep(
    lockstep: bool, concurrency: int | None, expected: int
) -> None:
    assert replay_settings(concurrency, lockstep).num_concurrent == expected
    with pytest.raises(ConfigError, match="remove --concurrency"):
        _ = replay_settings(2, lockstep=True).num_concurrent


def replay_settings(concurrency: int | None, lockstep: bool) -> ReplaySettings:
    return ReplaySettings(
        Path("rows.jsonl"),
        "question",
        "http://127.0.0.1:8000",
        app_command=None,
        model=None,
        concurrency=concurrency,
        limit=None,
        epochs=1,
        max_tokens=None,
        state=None,
        fresh=False,
        lockstep=lockstep,
    )
