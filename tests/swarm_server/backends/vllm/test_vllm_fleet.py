"""Two external vLLMs are one fleet: both get new weights, one that fails is connected again, and
different models are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from swarm_server.backends.vllm.rollouts import ExternalVllm, complete

from fakevllm_server.backends.vllm.simulated_vllm import Fault
from fakevllm_server.fleet import rollout
from fakevllm_server.fleet.rollout import FleetRollout
from fakevllm_server.fleet.router import CallAffinity
from fakevllm_server.types.backend import BackendRefused

WAIT_S = 20.0
pytestmark = pytest.mark.usefixtures("short_drain")


async def answers(fleet: FleetRollout) -> set[tuple[str, int]]:
    """Return the answers of 20 sessions, each with the version of the replica's weights."""
    given: set[tuple[str, int]] = set()
    for number in range(20):
        client = await fleet.client_for(CallAffinity(f"session {number}"))
        assert client is not None
        given.add((await complete(client.endpoint), client.endpoint.gate.version))
    return given


async def test_both_vllms_get_new_weights(
    external_vllm: ExternalVllm, weights: Path, tmp_path: Path
) -> None:
    async with external_vllm() as (one, first), external_vllm() as (two, second):
        fleet = FleetRollout({"replica-0": one, "replica-1": two}, tmp_path / "kept")
        await fleet.launch()
        await fleet.load_weights(weights, 3)
        assert (first.version, second.version) == ("3", "3")
        assert await answers(fleet) == {("trained", 3)}
        await fleet.close()


async def test_a_vllm_that_takes_no_weights_is_left_out_and_the_other_answers(
    external_vllm: ExternalVllm, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout, "FIRST_PAUSE_S", 0.01)
    broken_vllm = external_vllm(Fault.RELOADS_FAIL)
    async with external_vllm() as (one, _), broken_vllm as (two, broken):
        fleet = FleetRollout({"replica-0": one, "replica-1": two}, tmp_path / "kept")
        await fleet.launch()
        await fleet.load_weights(weights, 3)
        assert await answers(fleet) == {("trained", 3)}
        broken.faults.clear()
        async with asyncio.timeout(WAIT_S):
            while [each.state.value for each in fleet.figures] != ["serving"] * 2:
                await asyncio.sleep(0.01)
        assert (broken.version, broken.weights) == ("3", "trained")
        assert await answers(fleet) == {("trained", 3)}
        await fleet.close()


async def test_vllms_with_different_models_are_refused(
    external_vllm: ExternalVllm, tmp_path: Path
) -> None:
    async with external_vllm() as (one, _), external_vllm() as (two, other):
        other.name = "other"
        fleet = FleetRollout({"replica-0": one, "replica-1": two}, tmp_path / "kept")
        with pytest.raises(BackendRefused, match="replica-1 serves the model other"):
            await fleet.launch()
