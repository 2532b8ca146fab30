"""Earlier versions of the weights are loaded from their checkpoints, and unloaded for room."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio
from swarm_server.local_engines import LocalRollout, LocalTrainer

from fakevllm_server.backends.http.policies import MAX_POLICIES
from fakevllm_server.backends.process.rollout_trainer_pairs import TwoProcesses
from fakevllm_server.fleet.rollout import FleetRollout
from fakevllm_server.journal import reads, row_changes
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.log import RunLog
from fakevllm_server.run.releases import Releases
from fakevllm_server.training.checkpointing import Checkpointer
from fakevllm_server.training.policies import (
    IN_USE_S,
    MAX_PINNED,
    MAX_UNPINNED,
    PINNED_S,
    STALE_PIN_S,
    PolicyLoader,
    PolicyRefused,
)
from fakevllm_server.types.backend import Endpoint, PolicyName, Rollout, Trainer
from fakevllm_server.types.engine_spec import EngineSpec

SERVED = 9


class LocalLoader(PolicyLoader):
    """A loader that exports checkpoints in this process. An export waits until the event
    `can_export` is set."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.can_export, self.is_exporting = asyncio.Event(), asyncio.Event()
        self.can_export.set()

    async def _export(self, checkpoint: Path | None, to: Path) -> None:
        self.is_exporting.set()
        await self.can_export.wait()
        to.mkdir()
        theta = {"theta": -1.0}
        if checkpoint is not None:
            theta = orjson.loads((checkpoint / "theta.json").read_bytes())
        (to / "theta.json").write_bytes(orjson.dumps(theta))


class Policies:
    """A loader with a rollout engine and a journal."""

    def __init__(self, folder: Path, rollout: Rollout | None = None) -> None:
        self.served_version = SERVED
        self.rollout = LocalRollout() if rollout is None else rollout
        self.journal = Journal(folder / "journal.sqlite")
        self.releases = Releases(self.journal, RunLog(self.journal))
        self.folder = folder / "checkpoints"
        self.folders = CheckpointFolders(self.folder)
        self.loader = LocalLoader(
            TwoProcesses(self.rollout, LocalTrainer(), folder / "weights"),
            EngineSpec("fake", folder, None, "fake"),
            self.folders,
            self.journal,
            lambda: self.served_version,
            lambda: self.now_s,
            lambda: self.rejected,
            self.releases.set_answering,
        )
        self.rejected: set[int] = set()
        self.now_s = 1000.0
        self.endpoint = Endpoint(None, "http://engine", "fake", 100, holds_policies=True)

    async def save(self, *versions: int) -> None:
        """Write a checkpoint for each version."""
        for version in versions:

            async def write(to: Path, theta: float = float(version)) -> None:
                (to / "theta.json").write_bytes(orjson.dumps({"theta": theta}))

            name, digest = await self.folders.write(version, write)
            saved = SavedCheckpoint(version, name, version, digest, None)
            await self.journal.write(row_changes.saved(saved))

    async def load(self, version: int) -> str:
        return await self.loader.load(version, self.endpoint)

    async def pin(self, version: int) -> str:
        return await self.loader.load(version, self.endpoint, pinned=True)


@pytest_asyncio.fixture
async def policies(tmp_path: Path) -> AsyncGenerator[Policies]:
    policies = Policies(tmp_path)
    await policies.rollout.launch()
    yield policies
    policies.journal.close()


async def test_a_version_with_a_checkpoint_and_version_0_get_a_name_of_their_own(
    policies: Policies,
) -> None:
    await policies.save(3)
    assert [await policies.load(version) for version in (3, 0, 3)] == [
        "policy-3",
        "policy-0",
        "policy-3",
    ]
    assert await policies.rollout.policies() == {"policy-3": 3, "policy-0": 0}
    await policies.loader.unload(3)
    assert await policies.rollout.policies() == {"policy-0": 0}


async def test_the_served_version_without_a_checkpoint_has_the_models_name(
    policies: Policies,
) -> None:
    assert await policies.load(SERVED) == "fake"
    assert await policies.rollout.policies() == {}


async def test_version_0_has_a_name_of_its_own_while_it_is_served(policies: Policies) -> None:
    policies.served_version = 0
    assert await policies.load(0) == "policy-0"
    policies.endpoint = replace(policies.endpoint, holds_policies=False)
    assert await policies.load(0) == "fake"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (4, "Version 4 has no checkpoint .* can be sampled: 0, 3, 6."),
        (99, "Version 99 does not exist: the newest is 9. .* can be sampled: 0, 3, 6."),
    ],
)
async def test_a_version_that_cannot_be_sampled_is_refused_with_those_that_can(
    policies: Policies, version: int, message: str
) -> None:
    await policies.save(3, 6)
    with pytest.raises(PolicyRefused, match=message):
        await policies.load(version)


async def test_a_checkpoint_whose_files_are_gone_is_refused(policies: Policies) -> None:
    await policies.save(3)
    shutil.rmtree(policies.folder)
    with pytest.raises(PolicyRefused, match="The checkpoint of version 3 is gone"):
        await policies.load(3)


async def test_an_engine_with_one_set_of_weights_samples_only_the_served_version(
    policies: Policies,
) -> None:
    await policies.save(3, SERVED)
    policies.endpoint = replace(policies.endpoint, holds_policies=False)
    with pytest.raises(PolicyRefused, match=r"one set of weights, so only .* 9, can be"):
        await policies.load(3)
    assert await policies.load(SERVED) == "fake"
    assert await policies.rollout.policies() == {}


async def test_of_the_policies_that_nobody_uses_the_one_that_was_requested_first_makes_room(
    policies: Policies,
) -> None:
    versions = list(range(1, MAX_UNPINNED + 2))
    await policies.save(*versions)
    for version in (*versions[:-1], 1):
        policies.now_s += 1
        await policies.load(version)
    policies.now_s += IN_USE_S
    await policies.load(versions[-1])
    loaded = await policies.rollout.policies()
    assert set(loaded.values()) == set(versions) - {2}


async def test_a_policy_in_use_is_not_unloaded_for_another(policies: Policies) -> None:
    *versions, other = range(1, MAX_UNPINNED + 2)
    await policies.save(*versions, other)
    for version in versions:
        await policies.load(version)
    policies.now_s += IN_USE_S - 1
    with pytest.raises(PolicyRefused, match=r"all of them are in use .* wait until the other") as e:
        await policies.load(other)
    assert e.value.is_temporary
    assert set((await policies.rollout.policies()).values()) == set(versions)
    for version in versions[1:]:
        await policies.load(version)
    policies.now_s += 1
    assert await policies.load(other) == f"policy-{other}"
    assert set((await policies.rollout.policies()).values()) == {*versions[1:], other}


async def test_an_unloaded_policy_makes_room_at_once(policies: Policies) -> None:
    *versions, other = range(1, MAX_UNPINNED + 2)
    await policies.save(*versions, other)
    for version in versions:
        await policies.load(version)
    await policies.loader.unload(1)
    assert await policies.load(other) == f"policy-{other}"


async def test_a_restarted_engine_gets_its_policies_again(policies: Policies) -> None:
    await policies.save(3)
    await policies.load(3)
    await policies.rollout.launch()
    assert await policies.rollout.policies() == {}
    assert await policies.load(3) == "policy-3"
    assert await policies.rollout.policies() == {"policy-3": 3}


async def test_policies_that_a_restarted_replica_lacks_make_room_on_the_other_replicas(
    tmp_path: Path,
) -> None:
    replicas = {name: LocalRollout() for name in ("replica-0", "replica-1")}
    fleet = FleetRollout(replicas, tmp_path / "kept")
    policies = Policies(tmp_path, fleet)
    await fleet.launch()
    *versions, other = range(MAX_POLICIES + 1)
    await policies.save(*versions[1:], other)
    pinned, evaluated = versions[:MAX_PINNED], versions[MAX_PINNED:]
    for version in pinned:
        await policies.pin(version)
    for version in evaluated:
        await policies.load(version)
    await replicas["replica-1"].launch()
    policies.now_s += IN_USE_S - 1
    for version in pinned:
        await policies.pin(version)
    policies.now_s += 1
    assert await policies.load(other) == f"policy-{other}"
    held = [set((await replica.policies()).values()) for replica in replicas.values()]
    assert held == [{*pinned, *evaluated[1:], other}, {*pinned, other}]
    await fleet.close()
    policies.journal.close()


async def test_a_pinned_version_stays_whatever_evaluations_load_and_unload(
    policies: Policies,
) -> None:
    *versions, other = range(1, MAX_UNPINNED + 2)
    await policies.save(*versions, other)
    assert await policies.pin(0) == "policy-0"
    for version in versions:
        await policies.load(version)
    await policies.loader.unload(0)
    policies.now_s += IN_USE_S - 1
    assert await policies.pin(0) == "policy-0"
    policies.now_s += 1
    assert await policies.load(other) == f"policy-{other}"
    assert set((await policies.rollout.policies()).values()) == {0, *versions[1:], other}
    policies.now_s += PINNED_S
    await policies.loader.unload(0)
    assert 0 not in (await policies.rollout.policies()).values()


async def test_a_version_can_be_pinned_while_evaluations_use_all_of_their_places(
    policies: Policies,
) -> None:
    versions = range(1, MAX_UNPINNED + 1)
    await policies.save(*versions)
    for version in versions:
        await policies.load(version)
    assert await policies.pin(0) == "policy-0"
    assert set((await policies.rollout.policies()).values()) == {0, *versions}


async def test_a_version_that_answers_apps_no_more_makes_room_for_the_next_one(
    policies: Policies,
) -> None:
    await policies.save(1, 2)
    for version in (0, 1):
        await policies.pin(version)
    await policies.loader.unload(1, pinned=True)
    assert await policies.pin(2) == "policy-2"
    assert set((await policies.rollout.policies()).values()) == {0, 2}


async def test_only_two_versions_are_pinned_at_a_time(policies: Policies) -> None:
    await policies.save(1, 2)
    for version in (0, 1, 0):
        await policies.pin(version)
    with pytest.raises(PolicyRefused, match=r"2 versions answer apps \(policy-0, policy-1\)"):
        await policies.pin(2)
    policies.now_s += PINNED_S
    assert await policies.pin(2) == "policy-2"


async def test_a_version_whose_proxy_is_gone_makes_room_for_one_that_answers_apps(
    policies: Policies,
) -> None:
    versions = range(3, 3 + MAX_UNPINNED)
    await policies.save(1, 2, *versions)
    for version in (0, 1):
        await policies.pin(version)
    for version in versions:
        await policies.load(version)
    policies.now_s += STALE_PIN_S - 1
    with pytest.raises(PolicyRefused, match="2 versions answer apps"):
        await policies.pin(2)
    await policies.pin(0)
    policies.now_s += 1
    assert await policies.pin(2) == "policy-2"
    assert set((await policies.rollout.policies()).values()) == {0, 2, *versions}


async def test_a_version_is_not_displaced_while_its_pin_waits_for_a_slow_load(
    policies: Policies,
) -> None:
    await policies.save(1, 2, 3)
    for version in (0, 1):
        await policies.pin(version)
    policies.loader.can_export.clear()
    loading = asyncio.create_task(policies.load(3))
    await asyncio.wait_for(policies.loader.is_exporting.wait(), 10)
    policies.now_s += STALE_PIN_S
    displacing = asyncio.create_task(policies.pin(2))
    renewing = [asyncio.create_task(policies.pin(version)) for version in (0, 1)]
    await asyncio.sleep(0)
    policies.loader.can_export.set()
    assert await asyncio.gather(loading, *renewing) == ["policy-3", "policy-0", "policy-1"]
    with pytest.raises(PolicyRefused, match="2 versions answer apps"):
        await displacing


async def test_a_rejected_version_is_refused_while_another_one_is_loaded(
    policies: Policies,
) -> None:
    await policies.save(1, 3)
    await policies.pin(1)
    policies.loader.can_export.clear()
    loading = asyncio.create_task(policies.load(3))
    await asyncio.wait_for(policies.loader.is_exporting.wait(), 10)
    policies.rejected.add(1)
    with pytest.raises(PolicyRefused, match="1 was rejected"):
        await asyncio.wait_for(policies.pin(1), 10)
    assert 1 not in (await policies.rollout.policies()).values()
    policies.loader.can_export.set()
    await loading


async def test_a_served_version_that_cannot_be_held_cannot_be_pinned(policies: Policies) -> None:
    with pytest.raises(PolicyRefused, match="9 has no checkpoint"):
        await policies.pin(SERVED)
    policies.endpoint = replace(policies.endpoint, holds_policies=False)
    policies.served_version = 0
    with pytest.raises(PolicyRefused, match="holds one set of weights"):
        await policies.pin(0)


async def test_the_checkpoint_of_a_version_that_answers_apps_is_kept_also_after_a_restart(
    policies: Policies,
) -> None:
    await policies.save(1, 2, 3, 4, 5, 6)
    for version in (2, 0):
        await policies.pin(version)
    await policies.journal.flush()
    releases = Releases(policies.journal, RunLog(policies.journal))
    checkpointer = Checkpointer(
        LocalTrainer(), policies.folders, policies.journal, 1, lambda: releases.state.pinned
    )
    await checkpointer.prune()
    saved = policies.journal.read(reads.checkpoints)
    assert {one.version for one in saved} >= {2, 4, 5, 6} and len(saved) < 6
    await policies.rollout.launch()
    assert await policies.pin(2) == "policy-2"


async def test_the_checkpoint_of_a_version_that_answers_apps_no_more_is_not_kept(
    policies: Policies,
) -> None:
    await policies.save(1, 2, 3)
    for version in (1, 2, 1):
        await policies.pin(version)
    assert policies.releases.state.pinned == {0, 1, 2}
    policies.now_s += PINNED_S
    await policies.pin(1)
    await policies.pin(3)  # whoever pinned 2 is gone
    assert policies.releases.state.pinned == {0, 1, 3}
    await policies.loader.unload(1, pinned=True)
    assert policies.releases.state.pinned == {0, 3}
    policies.rejected.add(3)
    with pytest.raises(PolicyRefused):
        await policies.pin(3)
    await policies.journal.flush()
    restarted = Releases(policies.journal, RunLog(policies.journal))
    assert restarted.state.pinned == policies.releases.state.pinned == {0}


class AdapterTrainer(LocalTrainer):
    """A trainer whose adapters are its value of theta, or 0 for adapters that change nothing."""

    async def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        await self.export(folder)
        if policy == "reference":
            (folder / "theta.json").write_bytes(orjson.dumps({"theta": 0.0}))


class AdapterLoader(PolicyLoader):
    """A loader whose separate trainer is in this process."""

    @asynccontextmanager
    async def _separate_trainer(self, checkpoint: Path | None) -> AsyncGenerator[Trainer]:
        trainer = AdapterTrainer()
        await trainer.launch()
        assert checkpoint is not None, "the running trainer has the adapters that change nothing"
        await trainer.restore(checkpoint)
        yield trainer


async def test_an_engine_with_adapters_gets_those_of_the_checkpoint(
    policies: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await policies.save(3)
    running = AdapterTrainer()
    await running.launch()
    loader = AdapterLoader(
        TwoProcesses(policies.rollout, running, tmp_path / "weights"),
        EngineSpec("fake", tmp_path, str(tmp_path), "fake"),
        policies.folders,
        policies.journal,
        lambda: SERVED,
    )
    endpoint = replace(policies.endpoint, takes_adapters=True)
    loaded: dict[str, float] = {}

    async def load_policy(name: str, folder: Path, version: int) -> None:
        loaded[name] = orjson.loads((folder / "theta.json").read_bytes())["theta"]

    monkeypatch.setattr(policies.rollout, "load_policy", load_policy)
    for version in (0, 3):
        await loader.load(version, endpoint)
    assert loaded == {"policy-0": 0.0, "policy-3": 3.0}


async def test_adapters_in_a_checkpoint_are_loaded_without_a_separate_trainer(
    policies: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(to: Path) -> None:
        (to / "adapters").mkdir()
        (to / "adapters" / "adapter_config.json").write_text("{}")

    name, digest = await policies.folders.write(3, write)
    await policies.journal.write(row_changes.saved(SavedCheckpoint(3, name, 3, digest, None)))
    loader = PolicyLoader(
        TwoProcesses(policies.rollout, AdapterTrainer(), tmp_path / "weights"),
        EngineSpec("no such trainer", tmp_path, str(tmp_path), "fake"),
        policies.folders,
        policies.journal,
        lambda: SERVED,
    )
    loaded: dict[str, list[str]] = {}

    async def load_policy(name: str, folder: Path, version: int) -> None:
        loaded[name] = [file.name for file in folder.iterdir()]

    monkeypatch.setattr(policies.rollout, "load_policy", load_policy)
    await loader.load(3, replace(policies.endpoint, takes_adapters=True))
    assert loaded == {"policy-3": ["adapter_config.json"]}


async def test_a_publish_gives_an_engine_with_adapters_the_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout, trainer = LocalRollout(), AdapterTrainer()
    launch = rollout.launch

    async def launch_with_adapters() -> Endpoint:
        return replace(await launch(), takes_adapters=True)

    async def export(folder: Path) -> None:
        raise AssertionError("whole weights are not exported")

    monkeypatch.setattr(rollout, "launch", launch_with_adapters)
    backend = TwoProcesses(rollout, trainer, tmp_path / "weights")
    await backend.start()
    exported: list[PolicyName] = []

    async def export_adapters(folder: Path, policy: PolicyName) -> None:
        exported.append(policy)
        (folder / "theta.json").write_bytes(orjson.dumps({"theta": 1.0}))

    monkeypatch.setattr(trainer, "export", export)
    monkeypatch.setattr(trainer, "export_adapters", export_adapters)
    await backend.publish(4)
    assert exported == ["trained"] and rollout.loaded == [4]
    await backend.close()
