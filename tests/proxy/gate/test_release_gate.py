"""The release gate carries out the controller's decisions, also through outages and restarts."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from fakevllm.gate.release_gate import NUM_UNSCORED
from fakevllm.release.arm_gains import GroupOutcome
from fakevllm.release.arms import Arm
from fakevllm.release.held_out_draws import HeldOutDraws
from fakevllm_adapters.protocol.releases import (
    Decision,
)
from tests.proxy.gate.gate_rig import (
    DECISIONS_OF_A_RELEASE,
    PAUSE_S,
    REQUEST,
    ROWS,
    FakeServer,
    GateRig,
)
from tests.proxy.release.simulated_run import SimulatedServer
from tests.proxy.scripted_swarm import until


@pytest.fixture
def rig() -> GateRig:
    return GateRig(FakeServer(SimulatedServer([0.5] * 11)))


async def test_a_better_version_is_released_and_answers_apps(rig: GateRig) -> None:
    async with rig.running():
        await until(lambda: len(rig.decisions) == 2)
        await until(lambda: rig.released[-1] == 10)
    assert rig.decisions == DECISIONS_OF_A_RELEASE
    assert rig.released[0] == 0
    assert rig.unloaded == []
    assert rig.num_sampled(0) == rig.num_sampled(10) < 40


async def test_a_worse_version_is_rejected_and_unloaded(rig: GateRig) -> None:
    rig.rewards = lambda version: float(version == 0)
    async with rig.running():
        await until(lambda: rig.unloaded == [10])
    assert rig.decisions == [Decision.CANDIDATE, Decision.REJECTED]
    assert set(rig.released) == {0}


async def test_after_a_restart_no_row_is_sampled_again(rig: GateRig) -> None:
    rig.most_rows = 7
    async with rig.running():
        await until(lambda: len(rig.evaluated) >= 7)
    assert rig.decisions == [Decision.CANDIDATE]
    rig.most_rows = None
    async with rig.running():
        await until(lambda: len(rig.decisions) == 2)
    undisturbed = GateRig(FakeServer(SimulatedServer([0.5] * 11)))
    async with undisturbed.running():
        await until(lambda: len(undisturbed.decisions) == 2)
    assert rig.num_sampled(10) == undisturbed.num_sampled(10)
    assert rig.num_sampled(0) == undisturbed.num_sampled(0)


async def test_a_decision_whose_reply_is_lost_is_made_once(rig: GateRig) -> None:
    rig.server.num_lost_replies = 2
    async with rig.running():
        await until(lambda: len(rig.decisions) == 2)
        await until(lambda: rig.released[-1] == 10)
    assert rig.decisions == DECISIONS_OF_A_RELEASE


async def test_a_decision_is_sent_when_its_rows_are_in_the_ledgers_file(rig: GateRig) -> None:
    rig.server.on_decide = lambda: num_missing.append(len(rig.evaluated) - rig.num_flushed)
    num_missing: list[int] = []
    rig.num_failed_flushes = 3
    async with rig.running():
        await until(lambda: len(rig.decisions) == 2)
    assert num_missing == [0, 0]


async def test_a_disk_that_is_full_delays_a_verdict_on_held_out_rows_but_no_live_rejection(
    rig: GateRig,
) -> None:
    rig.num_failed_flushes = 1_000_000
    async with rig.running() as gate:
        await until(lambda: "disk is full" in (gate.view().trouble or ""))
        assert rig.decisions == [Decision.CANDIDATE]
        for number in range(40):
            gate.group_scored(outcome(f"released-{number}", Arm.RELEASED, 0.9))
            gate.group_scored(outcome(f"training-{number}", Arm.TRAINING, 0.1))
        await until(lambda: rig.decisions == [Decision.CANDIDATE, Decision.REJECTED])


async def test_a_server_that_cannot_be_reached_blocks_the_gate(rig: GateRig) -> None:
    rig.server.state.means = [0.5] * 5
    async with rig.running() as gate:
        await until(lambda: rig.released == [0])
        assert not gate.view().is_blocked
        rig.server.is_silent = True
        await until(lambda: gate.view().is_blocked)
        assert gate.view().trouble == "the server cannot be reached"
        rig.server.is_silent = False
        await until(lambda: not gate.view().is_blocked and gate.view().trouble is None)


async def test_a_training_step_and_a_version_that_is_loaded_do_not_block_the_gate(
    rig: GateRig,
) -> None:
    def be_busy() -> None:
        raise aiohttp.ClientResponseError(REQUEST, (), status=503)

    rig.server.on_decide = be_busy
    async with rig.running() as gate:
        await until(lambda: gate.view().trouble == "the server is busy")
        assert not gate.view().is_blocked
        rig.arm_trouble, rig.is_arm_loading = "not loaded yet", True
        await until(lambda: gate.view().trouble == "the released arm: not loaded yet")
        assert not gate.view().is_blocked
        rig.arm_trouble, rig.is_arm_loading = "the checkpoint is damaged", False
        await until(lambda: gate.view().is_blocked)


async def test_decisions_wait_while_the_server_is_away(rig: GateRig) -> None:
    rig.server.is_away = True
    async with rig.running() as gate:
        await until(lambda: rig.server.num_requests > 3)
        trouble = gate.view().trouble
        rig.server.is_away = False
        await until(lambda: len(rig.decisions) == 2)
        await until(lambda: gate.view().trouble is None)
    assert trouble is not None and "fakevllm-server start" in trouble


async def test_a_decision_of_an_operator_takes_effect_at_once(rig: GateRig) -> None:
    rig.server.state.means = [0.5] * 5
    async with rig.running() as gate:
        await until(lambda: rig.released == [0])
        num_requests = rig.server.num_requests
        rig.server.state.decide("operator-1", Decision.RELEASED, 3, by="anna")
        await until(lambda: rig.released[-1] == 3)
        assert rig.server.num_requests == num_requests + 1
        rig.server.state.decide("operator-2", Decision.HOLD, None, by="anna")
        await until(lambda: gate.view().is_held)


async def test_a_row_is_sampled_again_after_an_outage_of_the_engine(rig: GateRig) -> None:
    rig.num_outages = 3
    async with rig.running():
        await until(lambda: len(rig.decisions) == 2)
    assert rig.decisions == DECISIONS_OF_A_RELEASE


async def test_after_an_outage_the_first_attempts_follow_soon(rig: GateRig) -> None:
    rig.retry_every_s, rig.num_outages = 60.0, 3
    async with rig.running():
        await until(lambda: len(rig.decisions) == 2)
    rig.server.state.means.append(0.5)
    rig.server.is_away = True
    async with rig.running() as gate:
        await until(lambda: rig.server.num_requests > 3)
        rig.server.is_away = False
        await until(lambda: gate.view().released == 10)


async def test_rows_that_get_no_reward_are_reported_once_and_sampled_slowly(
    rig: GateRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.rewards = lambda version: None
    rig.retry_every_s = 0.05
    async with rig.running() as gate:
        await until(lambda: gate.view().trouble is not None)
        trouble = gate.view().trouble
        assert len(rig.evaluated) == 2 * NUM_UNSCORED
        await until(lambda: len(rig.evaluated) == 2 * NUM_UNSCORED + 4)
        assert gate.view().trouble == trouble
        rig.rewards = lambda version: float(version > 0)
        await until(lambda: len(rig.decisions) == 2)
        await until(lambda: gate.view().trouble is None)
    assert trouble is not None and "(hook_raised: KeyError: 'answer')" in trouble
    assert "`fakevllm check-hook`" in trouble
    assert len([line for line in caplog.messages if "held-out" in line]) == 1


async def test_nothing_is_evaluated_on_rows_that_were_trained_but_live_sessions_can_reject(
    rig: GateRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.unusable = "1 row of rows.jsonl was trained: take it out, and restart the proxy"
    async with rig.running() as gate:
        await until(lambda: gate.view().trouble == rig.unusable)
        rig.server.state, rig.server.run_id = SimulatedServer([0.5] * 11), "other"
        num_requests = rig.server.num_requests
        await until(lambda: rig.server.num_requests > num_requests)
        assert rig.decisions == [] and gate.view().trouble == rig.unusable
        for number in range(40):
            gate.group_scored(outcome(f"released-{number}", Arm.RELEASED, 0.9))
            gate.group_scored(outcome(f"training-{number}", Arm.TRAINING, 0.1))
        await until(lambda: rig.decisions == [Decision.REJECTED])
    assert rig.evaluated == []
    lines = [line for line in caplog.messages if "rows.jsonl" in line]
    assert lines == [f"no version is evaluated or released: {rig.unusable}"]


async def test_another_run_of_the_server_has_its_own_evaluations(rig: GateRig) -> None:
    async with rig.running():
        await until(lambda: len(rig.decisions) == 2)
        rig.server.state, rig.server.run_id = SimulatedServer([0.5] * 11), "other"
        await until(lambda: len(rig.decisions) == 2)
    assert set(rig.by_eval_id) == {"gate-10-run", "gate-10-other"}


async def test_nothing_is_evaluated_while_the_released_version_cannot_be_sampled(
    rig: GateRig,
) -> None:
    rig.arm_trouble = "the engine holds one set of weights"
    async with rig.running() as gate:
        await until(lambda: gate.view().trouble is not None)
        assert rig.decisions == []
        rig.arm_trouble = None
        await until(lambda: len(rig.decisions) == 2)


async def test_an_operator_does_not_wait_for_the_row_that_is_sampled(rig: GateRig) -> None:
    rig.most_rows = 4
    async with rig.running():
        await until(lambda: len(rig.evaluated) >= 4)
        rig.server.state.decide("operator-1", Decision.RELEASED, 5, by="anna")
        await until(lambda: rig.released[-1] == 5)
        rig.server.state.decide("operator-2", Decision.REJECTED, 6, by="anna")
        await until(lambda: rig.unloaded == [10])


async def test_a_candidate_is_compared_with_the_version_that_an_operator_releases_meanwhile(
    rig: GateRig,
) -> None:
    rig.most_rows = 4
    async with rig.running():
        await until(lambda: len(rig.evaluated) >= 4)
        rig.server.state.decide("operator-1", Decision.RELEASED, 5, by="anna")
        rig.rewards = lambda version: float(version != 10)
        rig.most_rows = None
        await until(lambda: Decision.REJECTED in rig.decisions)
    assert rig.num_sampled(5) > 10
    assert rig.num_sampled(0) <= 4


async def test_live_sessions_reject_a_version_while_a_row_is_sampled(rig: GateRig) -> None:
    rig.most_rows = 4
    async with rig.running() as gate:
        await until(lambda: len(rig.evaluated) >= 4)
        for number in range(40):
            gate.group_scored(outcome(f"released-{number}", Arm.RELEASED, 0.9))
            gate.group_scored(outcome(f"training-{number}", Arm.TRAINING, 0.1))
        await until(lambda: rig.decisions == [Decision.CANDIDATE, Decision.REJECTED])


async def test_a_worse_version_is_rejected_although_the_released_one_cannot_be_sampled(
    rig: GateRig,
) -> None:
    rig.server.state.means = [0.5] * 5
    rig.arm_trouble = "not loaded yet"
    async with rig.running() as gate:
        await until(lambda: gate.view().trouble == "the released arm: not loaded yet")
        for number in range(40):
            gate.group_scored(outcome(f"released-{number}", Arm.RELEASED, 0.9))
            gate.group_scored(outcome(f"training-{number}", Arm.TRAINING, 0.1))
        await until(lambda: rig.decisions == [Decision.REJECTED])


async def test_a_hook_edit_begins_the_evaluation_again(rig: GateRig) -> None:
    rig.hook_hash, rig.most_rows = "one" * 5, 7
    async with rig.running() as gate:
        await until(lambda: len(rig.evaluated) >= 7)
        assert gate.view().evaluation["pairs"] > 0
        rig.evaluated.clear()
        rig.hook_hash, rig.most_rows = "two" * 5, None
        await until(lambda: len(rig.decisions) == 2)
    undisturbed = GateRig(FakeServer(SimulatedServer([0.5] * 11)))
    async with undisturbed.running():
        await until(lambda: len(undisturbed.decisions) == 2)
    assert rig.num_sampled(10) == undisturbed.num_sampled(10)
    assert set(rig.by_eval_id) == {"gate-10-oneoneon-run", "gate-10-twotwotw-run"}


async def test_a_row_during_which_the_hook_was_edited_does_not_count(rig: GateRig) -> None:
    def rewards(version: int) -> float:
        if version == 10:  # it is sampled last
            rig.hook_hash = "new" * 5
        return float(version > 0)

    rig.hook_hash, rig.rewards = "one" * 5, rewards
    async with rig.running():
        await until(lambda: len(rig.decisions) == 2)
    eval_id = "gate-10-newnewne-run"
    draws = HeldOutDraws(eval_id, len(ROWS))
    assert draws.get(0).row != draws.get(1).row, "the first row tells which draw came first"
    assert rig.by_eval_id[eval_id][0].task_id == ROWS[draws.get(0).row].task_id


async def test_a_row_that_another_hook_has_scored_is_sampled_again(rig: GateRig) -> None:
    rig.hook_hash, rig.scored_by = "one" * 5, ["two" * 5, "one" * 5]
    async with rig.running():
        await until(lambda: len(rig.decisions) == 2)
    undisturbed = GateRig(FakeServer(SimulatedServer([0.5] * 11)))
    async with undisturbed.running():
        await until(lambda: len(undisturbed.decisions) == 2)
    assert len(rig.evaluated) > len(undisturbed.evaluated)
    assert rig.decisions == DECISIONS_OF_A_RELEASE


async def test_after_a_restart_known_rows_without_rewards_need_no_pause(rig: GateRig) -> None:
    rig.rewards = lambda version: None
    async with rig.running():
        await until(lambda: len(rig.evaluated) >= 2 * NUM_UNSCORED + 4)
    rig.retry_every_s, rig.rewards = 60.0, lambda version: float(version > 0)
    async with rig.running():
        await until(lambda: len(rig.decisions) == 2)


async def test_a_candidate_whose_checkpoint_is_damaged_is_undecided_in_the_end(
    rig: GateRig,
) -> None:
    rig.is_damaged = True
    async with rig.running():
        await until(lambda: rig.decisions == [Decision.CANDIDATE, Decision.UNDECIDED])


async def test_a_reward_outside_of_the_range_is_named_and_nothing_is_released(
    rig: GateRig,
) -> None:
    rig.rewards = lambda version: 9.0
    async with rig.running() as gate:
        await until(lambda: gate.view().trouble is not None)
        trouble, num_sampled = gate.view().trouble, len(rig.evaluated)
        num_requests = rig.server.num_requests
        rig.server.state.decide("operator-1", Decision.HOLD, None, by="anna")
        await until(lambda: rig.server.num_requests > num_requests)
    assert trouble is not None and "reward 9, outside of release.reward_range" in trouble
    assert rig.decisions == [Decision.CANDIDATE, Decision.HOLD]
    assert len(rig.evaluated) == num_sampled == 2


async def test_the_released_version_is_not_known_before_the_history_was_read(
    rig: GateRig,
) -> None:
    rig.server.is_away = True
    async with rig.running() as gate:
        await until(lambda: gate.view().trouble is not None)
        assert gate.view().released is None


def outcome(root: str, arm: Arm, mean: float, received_at: float = 2e9) -> GroupOutcome:
    return GroupOutcome(root, arm, received_at, mean, mean, mean, mean)


async def test_live_sessions_of_the_training_arm_can_reject_it(rig: GateRig) -> None:
    rig.server.state.means = [0.5] * 5
    async with rig.running() as gate:
        await until(lambda: rig.released == [0])
        for number in range(40):
            gate.group_scored(outcome(f"released-{number}", Arm.RELEASED, 0.9))
            gate.group_scored(outcome(f"training-{number}", Arm.TRAINING, 0.1))
        await until(lambda: rig.decisions == [Decision.REJECTED])
    assert rig.server.state.records[0].version == 4


async def test_a_live_rejection_that_the_server_refuses_does_not_stop_the_gate(
    rig: GateRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.server.state.means = [0.5] * 5
    rig.arm_trouble = "not loaded yet"
    async with rig.running() as gate:

        def let_training_arm_lose(name: str) -> None:
            for number in range(40):
                gate.group_scored(outcome(f"{name}-released-{number}", Arm.RELEASED, 0.9))
                gate.group_scored(outcome(f"{name}-training-{number}", Arm.TRAINING, 0.1))

        await until(lambda: rig.released == [0])
        let_training_arm_lose("first")
        await until(lambda: rig.decisions == [Decision.REJECTED])
        await until(lambda: gate.view().trouble == "the released arm: not loaded yet")
        let_training_arm_lose("second")
        await until(lambda: "nothing to go back from" in caplog.text)
        rig.arm_trouble = None
        rig.server.state.means += [0.5] * 10
        await until(lambda: Decision.RELEASED in rig.decisions)


async def test_each_live_session_counts_once_and_only_after_its_version_is_known(
    rig: GateRig,
) -> None:
    rig.server.state.means = [0.5] * 5
    async with rig.running() as gate:
        await until(lambda: rig.released == [0])
        for number in range(100):
            gate.group_scored(outcome(f"released-{number}", Arm.RELEASED, 0.9))
            gate.group_scored(outcome("one session", Arm.TRAINING, 0.1))
            gate.group_scored(outcome(f"early-{number}", Arm.TRAINING, 0.1, received_at=1.0))
        num_requests = rig.server.num_requests
        await asyncio.sleep(20 * PAUSE_S)
        assert rig.decisions == []
        assert rig.server.num_requests >= num_requests


async def test_the_released_version_is_read_before_the_first_look(rig: GateRig) -> None:
    rig.server.state.released = 7
    async with rig.running() as gate:
        await gate.prepare(1.0)
        assert rig.released[0] == 7
        assert gate.view().released == 7
