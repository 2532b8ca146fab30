"""After each publish, every replica is asked for a known prompt. A replica with other weights than
the trainer is taken out, and no answer of it is trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_server.local_engines import LocalTrainer, StaleRollout
from swarm_server.loops import Run
from swarm_server.samples import call

from fakevllm_server.backends.process.rollout_trainer_pairs import TwoProcesses
from fakevllm_server.fleet import rollout
from fakevllm_server.fleet.rollout import FleetRollout
from fakevllm_server.training import loop, stop_and_restart
from fakevllm_server.types.known_prompt import ProbeReply


class FleetRun(Run[TwoProcesses]):
    def __init__(self, folder: Path) -> None:
        self.rollouts = {f"replica-{number}": StaleRollout() for number in range(2)}
        self.fleet = FleetRollout(self.rollouts, folder / "kept")
        super().__init__(folder, TwoProcesses(self.fleet, LocalTrainer(), folder / "weights"))

    async def train(self, name: str) -> None:
        await self.finish_group(name)
        await self.trained(name)

    @property
    def restarts(self) -> list[int]:
        return [figures.num_restarts for figures in self.fleet.figures]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop_and_restart, "FIRST_S", 0.0)
    monkeypatch.setattr(loop, "SWEEP_EVERY_S", 0.01)
    monkeypatch.setattr(loop, "STEP_GRACE_S", 0.01)
    monkeypatch.setattr(rollout, "FIRST_PAUSE_S", 0.01)


async def test_a_replica_with_old_weights_gets_them_once_more(tmp_path: Path) -> None:
    run = FleetRun(tmp_path)
    await run.train("a")
    run.rollouts["replica-1"].is_stale.append(True)
    await run.train("b")
    assert run.rollouts["replica-1"].loaded == [0, 1, 2, 3], "version 3 repeats version 2"
    assert run.restarts == [0, 0]
    await run.stop()


async def test_a_replica_that_stays_stale_is_taken_out_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = FleetRun(tmp_path)
    await run.train("a")
    stale = run.rollouts["replica-1"]
    stale.is_stale.extend([True, True])
    await run.train("b")
    assert run.rollouts["replica-0"].num_launched == 1, "the good replica goes on"
    assert "replica-1 is taken out: it has other weights than the trainer" in caplog.text
    await run.until(lambda: stale.num_launched == 2)
    await run.until(lambda: stale.loaded[-1] == 4)
    await run.until(lambda: run.fleet.figures[1].state.value == "serving")
    for version in (2, 3):
        await run.capture(f"of {version}", call(version), call(version))
        ended = await run.end_group(f"of {version}", 1.0, 0.0)
        assert (ended.pooled, ended.failure_reason) == (False, "unverified_weights")
    await run.train("c")
    assert run.engine.version == 5
    assert run.restarts == [0, 1]
    await run.stop()


async def test_if_all_replicas_stay_stale_the_engine_is_started_again(tmp_path: Path) -> None:
    run = FleetRun(tmp_path)
    await run.train("a")
    for each in run.rollouts.values():
        each.is_stale.extend([True, True])
    await run.train("b")
    assert [each.num_launched for each in run.rollouts.values()] == [2, 2]
    await run.train("c")
    await run.stop()


async def test_an_engine_behind_a_load_balancer_serves_and_nothing_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = FleetRun(tmp_path)
    await run.train("a")
    probe = StaleRollout.probe

    async def alternating(self: StaleRollout) -> ProbeReply | None:
        reply = await probe(self)
        assert reply is not None
        other = [value - 1.0 for value in reply.log_probs]
        return ProbeReply(reply.ids, reply.log_probs, reply.dtype, reply.num_layers, [other])

    monkeypatch.setattr(StaleRollout, "probe", alternating)
    await run.finish_group("b")
    await run.until(lambda: "such as a load balancer" in (run.engine.detail or ""))
    assert run.engine.is_serving
    await run.capture("c", call(), call())
    ended = await run.end_group("c", 1.0, 0.0)
    assert (ended.pooled, ended.failure_reason) == (False, "training_refused")
    await run.stop()
