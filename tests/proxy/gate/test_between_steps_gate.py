"""The gate evaluates the served version while training waits, also through outages and restarts."""

from __future__ import annotations

import asyncio

import pytest

from fakevllm.release.between_steps import BetweenStepsController
from fakevllm_adapters.protocol.releases import Decision
from tests.proxy.gate.gate_rig import DECISIONS_OF_A_RELEASE, RULES, FakeServer, GateRig
from tests.proxy.release.simulated_run import SimulatedServer
from tests.proxy.scripted_swarm import until

NUM_DRAWS = RULES.max_draws


@pytest.fixture
def rig() -> GateRig:
    return GateRig(FakeServer(SimulatedServer([0.5])), controller=BetweenStepsController)


async def let_train(rig: GateRig, num: int = 10) -> None:
    """Wait until training may make versions, and make them."""
    state = rig.server.state
    last = state.newest + num
    await until(lambda: state.training_limit is not None and state.training_limit >= last)
    state.means += [0.5] * num


async def test_a_better_version_is_released_after_both_have_answered_the_same_rows(
    rig: GateRig,
) -> None:
    async with rig.running():
        await let_train(rig)
        await until(lambda: len(rig.decisions) == 2)
        await let_train(rig)
    assert rig.decisions[:2] == DECISIONS_OF_A_RELEASE
    assert rig.num_sampled(0) == NUM_DRAWS
    answered = [row.task_id for row in rig.evaluated if row.version == 10]
    reference = [row.task_id for row in rig.evaluated if row.version == 0]
    num_pairs = len(answered) - NUM_DRAWS  # version 10 is the next reference
    assert 0 < num_pairs < 40
    assert sorted(answered[:num_pairs]) == sorted(reference[:num_pairs])


async def test_after_a_rejection_the_restored_weights_answer_before_training_goes_on(
    rig: GateRig,
) -> None:
    rig.rewards = lambda version: float(version != 10)
    async with rig.running():
        await let_train(rig)
        await until(lambda: len(rig.decisions) == 2)
        await let_train(rig, 9)
    assert rig.decisions[:2] == [Decision.CANDIDATE, Decision.REJECTED]
    assert rig.num_sampled(11) == NUM_DRAWS


async def test_a_restarted_proxy_samples_no_row_of_the_reference_again(rig: GateRig) -> None:
    rig.most_rows = 50
    async with rig.running():
        await until(lambda: len(rig.evaluated) >= 50)
    rig.most_rows = None
    async with rig.running():
        await let_train(rig)
    assert NUM_DRAWS <= rig.num_sampled(0) <= NUM_DRAWS + 8


async def test_rows_that_another_version_answered_do_not_count(rig: GateRig) -> None:
    rig.served = [7] * 12
    async with rig.running():
        await let_train(rig)
    assert rig.served == []
    assert rig.num_sampled(0) >= NUM_DRAWS


async def test_training_that_went_on_before_the_reference_was_complete_waits(rig: GateRig) -> None:
    rig.most_rows = 20
    async with rig.running() as gate:
        await until(lambda: len(rig.evaluated) >= 20)
        rig.server.state.means.append(0.5)
        rig.most_rows = None
        await until(lambda: "version 1 answers the apps" in (gate.view().trouble or ""))
        assert gate.view().is_blocked
    assert rig.num_sampled(1) == 0
    assert rig.server.state.training_limit == 0


async def test_a_candidate_answers_a_row_again_that_the_hook_could_not_score(rig: GateRig) -> None:
    rewards = iter([None, None])
    rig.rewards = lambda version: next(rewards, 1.0) if version == 10 else 1.0
    async with rig.running():
        await let_train(rig)
        await until(lambda: Decision.RELEASED in rig.decisions)
    assert sum(not row.rewards for row in rig.evaluated) == 2
    assert rig.server.state.records[1].decision is Decision.RELEASED


async def test_the_reference_is_in_the_ledgers_file_before_training_goes_on(rig: GateRig) -> None:
    rig.num_failed_flushes = 3
    async with rig.running():
        await let_train(rig)
    assert rig.num_flushed >= NUM_DRAWS


async def test_while_the_ledgers_disk_is_full_training_waits(rig: GateRig) -> None:
    rig.num_failed_flushes = 1_000_000
    async with rig.running() as gate:
        await until(lambda: "its disk is full" in (gate.view().trouble or ""))
    assert rig.server.state.training_limit == 0


async def test_the_status_shows_the_progress_of_the_reference(rig: GateRig) -> None:
    rig.most_rows = 20
    async with rig.running() as gate:
        await until(lambda: len(rig.evaluated) >= 20)
        figures = gate.view().evaluation
    assert figures == {"reference": 0, "reference_draws": 16, "reference_size": NUM_DRAWS}


async def test_an_outage_only_delays_the_reference(rig: GateRig) -> None:
    rig.num_outages = 5
    async with rig.running():
        await let_train(rig)
        await until(lambda: len(rig.decisions) == 2)
    assert rig.decisions == DECISIONS_OF_A_RELEASE


async def test_training_is_limited_before_the_gate_runs(rig: GateRig) -> None:
    await rig.new_gate().prepare(1.0)
    assert rig.server.state.training_limit == 0


async def test_a_restarted_proxy_keeps_the_limit_that_lets_training_go_on(rig: GateRig) -> None:
    async with rig.running():
        await let_train(rig)
    limit = rig.server.state.training_limit
    await rig.new_gate().prepare(1.0)
    assert rig.server.state.training_limit == limit == 10


async def test_training_is_limited_as_soon_as_the_server_reports_its_version(rig: GateRig) -> None:
    rig.server.is_silent = True
    preparing = asyncio.create_task(rig.new_gate().prepare(10.0))
    await until(lambda: rig.server.num_requests > 0)
    assert rig.server.state.training_limit is None
    rig.server.is_silent = False
    await preparing
    assert rig.server.state.training_limit == 0


async def test_a_proxy_starts_although_the_server_cannot_be_reached(rig: GateRig) -> None:
    rig.server.is_away = True
    await rig.new_gate().prepare(0.01)
    assert rig.server.state.training_limit is None
