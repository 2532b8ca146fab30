"""Replicas are killed and frozen while clients sample groups and versions are published. No client
sees an error, and the replicas come back with the current weights."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Collection

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import EngineStatusReply
from fakevllm_server.backends.process.rollout_trainer_pairs import (
    kept_weights_folder,
    weights_folder,
)
from tests.e2e.fleet import START_TIMEOUT_S, Crowd, Fleet
from tests.e2e.processes import Processes

JOB = TrainJob(num_repeat=4, batch_size=4, lr=0.01, save_freq=100)
SERVING = {"serving"}


async def version_reaches(fleet: Fleet, version: int, timeout_s: float) -> None:
    await in_thread(fleet, lambda status: status.weight_version >= version, timeout_s)


async def in_thread(
    fleet: Fleet, condition: Callable[[EngineStatusReply], bool], timeout_s: float
) -> None:
    await asyncio.to_thread(fleet.wait, condition, timeout_s)


def all_serve(status: EngineStatusReply) -> bool:
    current = {(replica.state, replica.version) for replica in status.replicas}
    return current == {("serving", status.weight_version)}


async def killed_and_frozen(
    fleet: Fleet,
    crowd: Crowd,
    num_clients: int,
    versions: int,
    start_timeout_s: float = START_TIMEOUT_S,
) -> None:
    """Run clients until `versions` versions were published. Meanwhile, kill one replica and freeze
    another one. Each restart of a replica may take `start_timeout_s` seconds."""
    clients = asyncio.create_task(crowd.run(num_clients))
    await version_reaches(fleet, versions // 4, START_TIMEOUT_S)
    fleet.signal("replica-0", signal.SIGKILL)
    await in_thread(fleet, lambda status: status.replicas[0].restarts == 1, START_TIMEOUT_S)
    await in_thread(fleet, lambda status: status.replicas[0].state == "serving", start_timeout_s)
    fleet.signal("replica-1", signal.SIGSTOP)
    await in_thread(fleet, lambda status: status.replicas[1].restarts == 1, START_TIMEOUT_S)
    await in_thread(fleet, lambda status: status.replicas[1].state == "serving", start_timeout_s)
    await version_reaches(fleet, versions, START_TIMEOUT_S)
    crowd.is_stopping = True
    await clients
    await in_thread(fleet, all_serve, START_TIMEOUT_S)


async def versions_are_published(fleet: Fleet, versions: int) -> None:
    """Run one client until `versions` versions were published."""
    crowd = Crowd(fleet)
    client = asyncio.create_task(crowd.run(1))
    await version_reaches(fleet, versions, START_TIMEOUT_S)
    crowd.is_stopping = True
    await client


def check_versions(crowd: Crowd, more_than: int = 10) -> None:
    """Check that siblings that share a call were sampled with one version, and that `more_than`
    versions and one sampled groups."""
    assert len(crowd.groups) > 50
    assert not [group for group in crowd.groups if len(group.versions) > 1]
    assert len(frozenset[int]().union(*(group.versions for group in crowd.groups))) > more_than


def check_shared_calls(crowd: Crowd, names: Collection[str]) -> None:
    """Check that siblings that share a call have one replica, and that each replica has sampled."""
    shared = {group.other_replicas for group in crowd.groups if group.is_shared}
    assert shared == {frozenset({name}) for name in names}


def check_groups(crowd: Crowd, num_clients: int) -> None:
    """Check that nearly all groups have one replica.

    The router promises that a call of a group goes to the replica on which the group began, as long
    as this replica serves or drains, and no earlier attempt of the call has failed on it. A group
    has a second replica only if its first one fails, fails a health check, or loads new weights
    between two calls. Each client has one open group, so each of the two failures can split at most
    `num_clients` groups. A replica loads only after it had no calls for a while, so this splits
    hardly any groups. A router that forgets groups splits more than every twelfth group of the fake
    engine.
    """
    most = 2 * num_clients
    assert len(crowd.groups) > 24 * most, "too few groups to tell such a router from a right one"
    split = [group for group in crowd.groups if len(group.replicas) > 1]
    assert len(split) <= most, split


def test_fake_replicas_are_killed_and_frozen_and_no_client_notices(processes: Processes) -> None:
    with Fleet(processes.server("--backend", "fake", "--replicas", "3")) as fleet:
        fleet.start(JOB)
        assert set(fleet.states().values()) == SERVING
        crowd = Crowd(fleet)
        asyncio.run(killed_and_frozen(fleet, crowd, num_clients=6, versions=20))
        assert not crowd.errors
        check_versions(crowd)
        names = ("replica-0", "replica-1", "replica-2")
        check_shared_calls(crowd, names)
        check_groups(crowd, num_clients=6)
        metrics = fleet.wait_for_metrics(
            *(f'fakevllm_replica_serving{{replica="{name}"}} 1.0' for name in names),
            'fakevllm_replica_restarts{replica="replica-2"} 0.0',
        )
        running = metrics.split("vllm:num_requests_running", 1)[1]
        assert all(f'replica="{name}"' in running for name in names)


def test_the_weights_of_a_killed_fleet_are_removed_by_a_server_with_one_engine(
    processes: Processes,
) -> None:
    server = processes.server("--backend", "fake", "--replicas", "2")
    kept = kept_weights_folder(weights_folder(server.folder, None))
    new = kept.with_name(f"{kept.name}-new")
    with Fleet(server) as fleet:
        fleet.start(JOB)
        asyncio.run(versions_are_published(fleet, 1))
        assert kept.is_dir()
    server.kill()
    new.mkdir()  # as after a kill while the copy is made
    with Fleet(processes.server("--backend", "fake")) as single:
        single.wait(lambda status: status.engine_status == "ENGINE.ROLLING")
        assert not kept.exists() and not new.exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_embedded_replicas_are_killed_and_frozen_while_20_versions_are_published(
    processes: Processes,
) -> None:
    server = processes.server("--backend", "embedded", "--model", "demo", "--replicas", "3")
    with Fleet(server) as fleet:
        fleet.start(JOB.model_copy(update={"lr": 1e-5}))
        crowd = Crowd(fleet)
        asyncio.run(killed_and_frozen(fleet, crowd, num_clients=50, versions=20))
        assert not crowd.errors
        check_versions(crowd)
        check_shared_calls(crowd, ("replica-0", "replica-1", "replica-2"))


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(900)
def test_vllm_replicas_are_killed_and_frozen_while_versions_are_published(
    processes: Processes,
) -> None:
    server = processes.server("--backend", "vllm", "--model", "demo", "--replicas", "2")
    with Fleet(server) as fleet:
        fleet.start(JOB.model_copy(update={"lr": 1e-5}), timeout_s=300)
        crowd = Crowd(fleet)
        work = killed_and_frozen(fleet, crowd, num_clients=16, versions=20, start_timeout_s=200)
        asyncio.run(work)
        assert not crowd.errors
        check_versions(crowd)
        check_shared_calls(crowd, ("replica-0", "replica-1"))
