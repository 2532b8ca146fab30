"""The versions of the arms are kept loaded, and trouble with them is reported once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from fakevllm.gate import arm_policies
from fakevllm.gate.arm_policies import OLD_SERVER, ArmPolicies
from fakevllm.ledger.store import Ledger
from fakevllm.release.arms import Arm
from fakevllm.swarm.errors import VERSIONS_NEED_ADMIN_KEY
from fakevllm.swarm.server_connection import SwarmLink
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import LoadPolicyReply, SuccessReply
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
            assert policies.is_loading(Arm.BASELINE) and not policies.is_loading(Arm.TRAINING)
            assert await policies.wait_loaded(Arm.BASELINE) is None
            assert policies.trouble(Arm.BASELINE) is None
            assert not policies.is_loading(Arm.BASELINE)
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
    caplog.set_level(logging.WARNING, "fakevllm.gate.arm_policies")
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


async def test_after_a_restart_of_the_engine_a_version_is_requested_again_soon(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm_policies, "FIRST_RETRY_S", 0.01)
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = LOADED
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            swarm.answers["/load_policy"] = 503
            assert await policies.reload(Arm.BASELINE, "policy-7") is not None
            num = swarm.calls["/load_policy"]
            await until(lambda: swarm.calls["/load_policy"] >= num + 2)
            swarm.answers["/load_policy"] = LOADED
            await until(lambda: policies.trouble(Arm.BASELINE) is None)
            swarm.answers["/load_policy"] = 503
            policies.set_version(Arm.BASELINE, 9)
            await until(lambda: policies.trouble(Arm.BASELINE) not in (None, "not loaded yet"))
            swarm.answers["/load_policy"] = LoadPolicyReply(success=True, model="policy-9")
            await until(lambda: policies.trouble(Arm.BASELINE) is None)


async def test_a_version_that_is_loaded_answers_also_if_it_cannot_be_requested_again(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm_policies, "KEEP_EVERY_S", 0.01)
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = LOADED
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            swarm.answers["/load_policy"] = 503
            num = swarm.calls["/load_policy"]
            await until(lambda: swarm.calls["/load_policy"] >= num + 3)
            assert policies.trouble(Arm.BASELINE) is None
            assert await policies.reload(Arm.BASELINE, "policy-7") is not None


async def test_a_lost_version_is_loaded_again(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = LOADED
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            assert await policies.reload(Arm.BASELINE, "policy-7") is None
            assert swarm.calls["/load_policy"] == 2
            swarm.answers["/load_policy"] = REFUSED
            assert await policies.reload(Arm.BASELINE, "policy-7") == "Version 7 has no checkpoint"


async def test_requests_do_not_wait_long_for_a_version_that_loads_slowly(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm_policies, "MAX_WAIT_S", 0.0)
    async with ScriptedSwarm() as swarm:
        swarm.answers["/load_policy"] = LOADED
        async with policies_of(swarm, ledger) as policies:
            assert await policies.wait_loaded(Arm.BASELINE) == "not loaded yet"
            await until(lambda: policies.trouble(Arm.BASELINE) is None)


class VersionServer:
    """A scripted server that holds at most `max_pinned` versions for apps. It loads the versions in
    `slow` only when the event is set."""

    def __init__(self, swarm: ScriptedSwarm, max_pinned: int = 1) -> None:
        self.max_pinned = max_pinned
        self.loaded: dict[int, bool] = {}
        """Maps each loaded version to True if the version is held for apps."""
        self.rejected: set[int] = set()
        self.slow: dict[int, asyncio.Event] = {}
        self.can_unload = True
        swarm.functions |= {"/load_policy": self._load, "/unload_policy": self._unload}

    async def _load(self, body: dict[str, Any]) -> LoadPolicyReply:
        version = body["version"]
        if version in self.rejected:
            self.loaded.pop(version, None)
            return LoadPolicyReply(success=False, failure_reason=f"Version {version} was rejected.")
        pinned = [one for one, is_pinned in self.loaded.items() if is_pinned and one != version]
        if body["pinned"] and len(pinned) >= self.max_pinned:
            return LoadPolicyReply(success=False, failure_reason=f"{pinned} answer apps.")
        if version not in self.loaded and version in self.slow:
            await self.slow[version].wait()
        self.loaded[version] = body["pinned"] or self.loaded.get(version, False)
        return LoadPolicyReply(success=True, model=f"policy-{version}")

    async def _unload(self, body: dict[str, Any]) -> SuccessReply:
        if self.can_unload:
            self.loaded.pop(body["version"], None)
        return SuccessReply(success=self.can_unload)


async def test_the_old_version_answers_until_the_new_one_is_loaded(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        server = VersionServer(swarm)
        server.slow[9] = asyncio.Event()
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            policies.set_version(Arm.BASELINE, 9)
            await until(lambda: swarm.bodies["/load_policy"]["version"] == 9)
            assert await policies.wait_loaded(Arm.BASELINE) is None
            assert policies.model(Arm.BASELINE) == "policy-7"
            assert not policies.is_current(Arm.BASELINE, "policy-7")
            assert policies.trouble(Arm.BASELINE) == "not loaded yet"
            server.slow[9].set()
            await until(lambda: server.loaded == {9: True})
            assert policies.model(Arm.BASELINE) == "policy-9"
            assert policies.is_current(Arm.BASELINE, "policy-9")
            assert policies.trouble(Arm.BASELINE) is None


async def test_a_rejected_version_answers_no_more_also_if_the_new_one_loads_slowly(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedSwarm() as swarm:
        server = VersionServer(swarm)
        server.slow[9] = asyncio.Event()
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            server.rejected.add(7)
            policies.set_version(Arm.BASELINE, 9)
            await until(lambda: policies.model(Arm.BASELINE) == "policy-9")
            assert policies.trouble(Arm.BASELINE) == "not loaded yet"
            server.slow[9].set()
            await until(lambda: server.loaded == {9: True})
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]


async def test_versions_that_follow_each_other_quickly_are_all_unloaded(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        server = VersionServer(swarm)
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            for version in (9, 11, 13):
                policies.set_version(Arm.BASELINE, version)
            await until(lambda: server.loaded == {13: True})
            assert policies.model(Arm.BASELINE) == "policy-13"


async def test_a_version_that_could_not_be_unloaded_is_unloaded_later(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm_policies, "RETRY_EVERY_S", 0.01)
    async with ScriptedSwarm() as swarm:
        server = VersionServer(swarm, max_pinned=2)
        server.can_unload = False
        async with policies_of(swarm, ledger) as policies:
            monkeypatch.setattr(arm_policies, "KEEP_EVERY_S", 0.01)
            await policies.wait_loaded(Arm.BASELINE)
            policies.set_version(Arm.BASELINE, 9)
            await until(lambda: server.loaded == {7: True, 9: True})
            server.can_unload = True
            await until(lambda: server.loaded == {9: True})


async def test_a_call_of_a_replaced_version_does_not_make_the_new_one_wait(ledger: Ledger) -> None:
    async with ScriptedSwarm() as swarm:
        VersionServer(swarm)
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            policies.set_version(Arm.BASELINE, 9)
            await until(lambda: policies.model(Arm.BASELINE) == "policy-9")
            num = swarm.calls["/load_policy"]
            assert await policies.reload(Arm.BASELINE, "policy-7") is None
            assert swarm.calls["/load_policy"] <= num + 1  # that of keeping it for apps


async def test_the_version_that_answers_is_kept_while_the_next_one_cannot_be_loaded(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    async with ScriptedSwarm() as swarm:
        server = VersionServer(swarm)
        async with policies_of(swarm, ledger) as policies:
            await policies.wait_loaded(Arm.BASELINE)
            server.rejected.add(9)
            policies.set_version(Arm.BASELINE, 9)
            await until(lambda: policies.trouble(Arm.BASELINE) == "Version 9 was rejected")
            assert await policies.wait_loaded(Arm.BASELINE) is None
            assert server.loaded == {7: True}
            policies.set_version(Arm.BASELINE, 7)
            assert policies.trouble(Arm.BASELINE) is None
    assert "until it can, version 7 answers the arm's sessions" in caplog.text


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
