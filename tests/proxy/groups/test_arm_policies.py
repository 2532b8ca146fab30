"""The versions of the arms are kept loaded, and trouble with them is reported once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fakevllm.groups import arm_policies
from fakevllm.groups.arm_policies import OLD_SERVER, ArmPolicies
from fakevllm.ledger.store import Ledger
from fakevllm.release.arms import Arm
from fakevllm.swarm.errors import VERSIONS_NEED_ADMIN_KEY
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import LoadPolicyReply
from tests.proxy.scripted_swarm import ScriptedSwarm, until

LOADED = LoadPolicyReply(success=True, model="policy-7")
REFUSED = LoadPolicyReply(success=False, failure_reason="Version 7 has no checkpoint.")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    opened = Ledger.open(tmp_path / "ledger.sqlite")
    yield opened
    opened.close()


@asynccontextmanager
async def policies_of(swarm: ScriptedSwarm, ledger: Ledger) -> AsyncGenerator[ArmPolicies]:
    link = SwarmLink(swarm.url, None, TrainJob(), ledger)
    link.serving.set()
    policies = ArmPolicies(link, {Arm.BASELINE: 7}, "Choose another version.")
    running = asyncio.create_task(policies.run())
    try:
        yield policies
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await policies.close()
        await link.close()


async def test_a_version_is_pinned_at_the_start(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = LOADED
        async with policies_of(swarm, ledger) as policies:
            assert await policies.wait_loaded(Arm.BASELINE) is None
            assert policies.trouble(Arm.BASELINE) is None
            assert policies.trouble(Arm.TRAINING) is None
            assert policies.model(Arm.BASELINE) == "policy-7"
            assert swarm.bodies["/load_policy"] == {"version": 7, "pinned": True}
            assert await policies.wait_loaded(Arm.BASELINE) is None
            assert swarm.calls["/load_policy"] == 1


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (REFUSED, "Version 7 has no checkpoint"),
        (LoadPolicyReply(success=True, model="qwen"), "the engine holds one set of weights"),
        (404, OLD_SERVER),
        (403, VERSIONS_NEED_ADMIN_KEY.rstrip(".")),
    ],
)
async def test_trouble_is_logged_once_and_the_version_is_not_requested_for_each_request(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, answer: object, trouble: str
) -> None:
    caplog.set_level(logging.WARNING, "fakevllm.groups.arm_policies")
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = answer
        async with policies_of(swarm, ledger) as policies:
            for _ in range(3):
                assert await policies.wait_loaded(Arm.BASELINE) == trouble
            assert swarm.calls["/load_policy"] == 1
    (record,) = caplog.records
    assert trouble in record.getMessage()
    assert record.getMessage().endswith("Choose another version.")


async def test_trouble_that_passes_ends(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_policies, "RETRY_EVERY_S", 0.01)
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = 503
        async with policies_of(swarm, ledger) as policies:
            await until(lambda: swarm.calls["/load_policy"] >= 2)
            swarm.answers["/load_policy"] = LOADED
            await until(lambda: policies.trouble(Arm.BASELINE) is None)


async def test_a_lost_version_is_loaded_again(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = LOADED
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            assert await policies.reload(Arm.BASELINE) is None
            assert swarm.calls["/load_policy"] == 2
            swarm.answers["/load_policy"] = REFUSED
            assert await policies.reload(Arm.BASELINE) == "Version 7 has no checkpoint"


async def test_requests_do_not_wait_long_for_a_version_that_loads_slowly(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm_policies, "MAX_WAIT_S", 0.0)
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = LOADED
        async with policies_of(swarm, ledger) as policies:
            assert await policies.wait_loaded(Arm.BASELINE) == "not loaded yet"
            await until(lambda: policies.trouble(Arm.BASELINE) is None)


async def test_an_arm_gets_another_version(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = LOADED
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            policies.set_version(Arm.BASELINE, 9)
            assert policies.model(Arm.BASELINE) == "policy-9"
            swarm.answers["/load_policy"] = LoadPolicyReply(success=True, model="policy-9")
            assert await policies.wait_loaded(Arm.BASELINE) is None


async def test_the_version_that_answered_an_arm_before_is_unloaded(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = LOADED
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            assert swarm.calls["/unload_policy"] == 0
            policies.set_version(Arm.BASELINE, 9)
            await policies.wait_loaded(Arm.BASELINE)
            assert swarm.bodies["/unload_policy"] == {"version": 7, "pinned": True}
            policies.set_version(Arm.BASELINE, 9)
            await policies.wait_loaded(Arm.BASELINE)
            assert swarm.calls["/unload_policy"] == 1


async def test_a_version_that_another_arm_has_too_stays_loaded(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = LOADED
        link = SwarmLink(swarm.url, None, TrainJob(), ledger)
        policies = ArmPolicies(link, {Arm.BASELINE: 7, Arm.RELEASED: 7}, "Choose another.")
        try:
            policies.set_version(Arm.RELEASED, 9)
            await policies.wait_loaded(Arm.RELEASED)
            assert swarm.calls["/unload_policy"] == 0
        finally:
            await policies.close()
            await link.close()
