"""The fleet loads new weights into one replica after the other, and takes out failing replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import orjson
import pytest
from swarm_server.local_engines import LocalRollout

from fakevllm_server.fleet import replica, rollout
from fakevllm_server.fleet.rollout import FleetRollout
from fakevllm_server.fleet.router import NO_AFFINITY, CallAffinity
from fakevllm_server.types.backend import ActionFailed, BackendError, BackendRefused, Endpoint
from fakevllm_server.types.known_prompt import ProbeReply

WAIT_S = 20.0
NAMES = ("replica-0", "replica-1", "replica-2")
POLICY = "policy-1"
THETA = 5.0


class Replicas:
    """A fleet whose replicas run in this process, and the weights to load."""

    def __init__(self, folder: Path) -> None:
        self.rollouts = {name: LocalRollout() for name in NAMES}
        self.fleet = FleetRollout(self.rollouts, folder / "kept")
        self.new_weights = folder / "new"
        self.new_weights.mkdir()
        (self.new_weights / "theta.json").write_bytes(orjson.dumps({"theta": THETA}))

    async def publish(self, version: int) -> None:
        await self.fleet.load_weights(self.new_weights, version)

    @property
    def states(self) -> list[str]:
        return [figures.state.value for figures in self.fleet.figures]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.01)

    async def until_all_serve(self) -> None:
        await self.until(lambda: self.states == ["serving"] * 3)

    async def chosen(self, call: CallAffinity) -> str:
        """Return the name of the replica that would answer a call."""
        client = await self.fleet.client_for(call)
        replicas = self.fleet._replicas.values()  # pyright: ignore[reportPrivateUsage]
        (name,) = [each.name for each in replicas if each.client is client]
        return name


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(rollout, "RECHECK_S", 0.01)


@pytest.fixture
async def replicas(tmp_path: Path) -> AsyncIterator[Replicas]:
    made = Replicas(tmp_path)
    await made.fleet.launch()
    yield made
    await made.fleet.close()


async def test_while_one_replica_takes_new_weights_the_others_answer(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    load = LocalRollout.load_weights

    async def watched(self: LocalRollout, folder: Path, version: int) -> None:
        seen.append(sorted(replicas.states))
        await load(self, folder, version)

    monkeypatch.setattr(LocalRollout, "load_weights", watched)
    await replicas.publish(1)
    assert seen == [["loading", "serving", "serving"]] * 3
    assert [each.loaded for each in replicas.rollouts.values()] == [[1]] * 3
    assert replicas.states == ["serving"] * 3


async def test_a_replica_finishes_its_calls_before_it_takes_new_weights(
    replicas: Replicas,
) -> None:
    begun = CallAffinity("session", "group")
    name = await replicas.chosen(begun)
    client = await replicas.fleet.client_for(begun)
    assert client is not None
    async with client.endpoint.gate.call():
        publish = asyncio.create_task(replicas.publish(1))
        await replicas.until(lambda: replicas.states[NAMES.index(name)] == "draining")
        assert replicas.rollouts[name].loaded == []
        assert await replicas.chosen(begun) == name, "the group goes on"
        assert await replicas.chosen(CallAffinity("session", "next")) != name
    await publish
    assert replicas.rollouts[name].loaded == [1]


async def test_a_replica_that_dies_is_started_again_with_the_current_weights(
    replicas: Replicas,
) -> None:
    await replicas.publish(3)
    dead = replicas.rollouts["replica-1"]
    lost = asyncio.create_task(replicas.fleet.lost())
    dead.die("it was killed")
    await replicas.until(lambda: dead.num_launched == 2)
    await replicas.until_all_serve()
    assert dead.loaded == [3, 3]
    assert dead.engine is not None
    assert dead.engine._sampler_theta == THETA  # pyright: ignore[reportPrivateUsage]
    figures = replicas.fleet.figures[1]
    assert (figures.num_restarts, figures.cause) == (1, "it was killed")
    assert not lost.done(), "the fleet goes on"
    lost.cancel()


async def test_a_restarted_replica_does_not_answer_before_it_has_the_weights(
    replicas: Replicas,
) -> None:
    await replicas.publish(1)
    dead = replicas.rollouts["replica-0"]
    dead.plan("load_weights", BackendError("the folder cannot be read"))
    dead.die("it was killed")
    await replicas.until(lambda: dead.num_launched == 3)
    await replicas.until_all_serve()
    assert dead.loaded == [1, 1], "the second life got none, and was ended"


async def test_a_replica_that_does_not_take_new_weights_is_taken_out(replicas: Replicas) -> None:
    broken = replicas.rollouts["replica-1"]
    broken.may_launch.clear()
    broken.plan("load_weights", BackendError("no memory"))
    await replicas.publish(1)
    assert replicas.states == ["serving", "starting", "serving"]
    assert replicas.fleet.figures[1].cause == "it did not take new weights: no memory"
    chosen = {await replicas.chosen(CallAffinity(f"s{n}")) for n in range(20)}
    assert chosen == {"replica-0", "replica-2"}
    broken.may_launch.set()
    await replicas.until_all_serve()
    assert broken.loaded == [1]


async def test_a_publish_fails_only_if_no_replica_takes_the_weights(replicas: Replicas) -> None:
    for each in replicas.rollouts.values():
        each.may_launch.clear()
        each.plan("load_weights", BackendError("no memory"))
    with pytest.raises(BackendError, match=r"^no replica has taken the new weights: no memory$"):
        await replicas.publish(1)
    assert "all 3 replicas are gone" in await replicas.fleet.lost()
    assert not await replicas.fleet.health()


async def test_the_fleet_is_lost_only_when_the_last_replica_dies(replicas: Replicas) -> None:
    lost = asyncio.create_task(replicas.fleet.lost())
    for number, each in enumerate(replicas.rollouts.values()):
        assert not lost.done() and await replicas.fleet.health()
        each.may_launch.clear()
        each.die(f"cause {number}")
        await replicas.until(lambda: replicas.states.count("starting") == number + 1)  # noqa: B023
    assert "replica-2: cause 2" in await lost
    assert await replicas.fleet.client_for() is None


async def test_a_call_that_failed_goes_to_another_replica(replicas: Replicas) -> None:
    call = CallAffinity("session")
    failed = await replicas.fleet.client_for(call)
    assert await replicas.fleet.client_for(call) is failed
    assert await replicas.fleet.client_for(call, failed) not in (failed, None)


async def test_a_burst_of_failed_calls_begins_no_further_health_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "CHECK_INTERVAL_S", 60.0)
    made = Replicas(tmp_path)
    await made.fleet.launch()
    call = CallAffinity("session")
    failed = await made.fleet.client_for(call)
    name = await made.chosen(call)
    made.rollouts[name].num_slow_checks = 10
    for _ in range(10):
        assert await made.fleet.client_for(call, failed) is not failed
        for _ in range(10):
            await asyncio.sleep(0)
    assert made.rollouts[name].num_slow_checks == 10, "no check has begun"
    assert sorted(made.states) == ["serving", "serving", "suspect"]
    await made.fleet.close()


async def test_failed_calls_of_the_only_replica_wait_until_it_passes_its_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(rollout, "RECHECK_S", 60.0)
    only = LocalRollout()
    fleet = FleetRollout({"replica-0": only}, tmp_path / "kept")
    await fleet.launch()
    failed = await fleet.client_for()
    only.num_slow_checks = 2
    calls = [asyncio.create_task(fleet.client_for(NO_AFFINITY, failed)) for _ in range(20)]
    async with asyncio.timeout(WAIT_S):
        assert await asyncio.gather(*calls) == [failed] * 20
    assert only.num_slow_checks == 0, "a failed check does not let a call go on"
    assert fleet.figures[0].num_restarts == 0
    await fleet.close()


async def test_replicas_that_serve_different_models_are_refused(tmp_path: Path) -> None:
    class OtherModel(LocalRollout):
        async def launch(self) -> Endpoint:
            endpoint = await super().launch()
            return Endpoint(None, endpoint.url, "other", endpoint.max_model_len)

    rollouts = {"replica-0": LocalRollout(), "replica-1": OtherModel()}
    fleet = FleetRollout(rollouts, tmp_path / "kept")
    with pytest.raises(BackendRefused) as refused:
        await fleet.launch()
    assert str(refused.value).startswith(
        "replica-0 serves the model fake, and replica-1 serves the model other"
    )
    assert [each.engine for each in rollouts.values()] == [None, None], "both were ended"


async def test_a_replica_that_does_not_start_is_tried_again_while_the_others_answer(
    tmp_path: Path,
) -> None:
    made = Replicas(tmp_path)
    made.rollouts["replica-2"].plan("launch", BackendError("no memory"))
    await made.fleet.launch()
    await made.until_all_serve()
    await made.fleet.close()
    assert made.states == ["starting"] * 3
    for each in made.rollouts.values():
        each.plan("launch", BackendError("no memory"))
    with pytest.raises(BackendError, match="no memory"):
        await made.fleet.launch()


async def test_every_replica_loads_a_policy_and_calls_find_a_replica_that_holds_it(
    replicas: Replicas,
) -> None:
    fleet = replicas.fleet
    await fleet.load_policy(POLICY, replicas.new_weights, 1)
    replicas.rollouts["replica-0"].die("it was killed")
    await replicas.until(lambda: replicas.rollouts["replica-0"].num_launched == 2)
    await replicas.until_all_serve()
    calls = [CallAffinity(f"s{n}", policy=POLICY) for n in range(20)]
    assert {await replicas.chosen(call) for call in calls} == {"replica-1", "replica-2"}
    assert await fleet.policies() == {}, "the new life of replica-0 holds none"
    await fleet.load_policy(POLICY, replicas.new_weights, 1)
    assert await fleet.policies() == {POLICY: 1}
    await fleet.unload_policy(POLICY)
    assert await fleet.policies() == {}


async def test_a_policy_that_a_replica_refuses_is_refused(replicas: Replicas) -> None:
    replicas.rollouts["replica-1"].plan("load_policy", ActionFailed("it holds too many"))
    with pytest.raises(ActionFailed, match="it holds too many"):
        await replicas.fleet.load_policy(POLICY, replicas.new_weights, 1)


async def test_each_replica_is_asked_for_the_known_prompt(replicas: Replicas) -> None:
    await replicas.publish(1)
    engine = replicas.rollouts["replica-1"].engine
    assert engine is not None
    engine._sampler_theta = -5.0  # pyright: ignore[reportPrivateUsage]
    reply = await replicas.fleet.probe()
    assert reply is not None
    first, second, third = (reply.by_replica[name].log_probs for name in NAMES)
    assert first == third != second


async def test_the_replicas_are_asked_for_the_known_prompt_at_the_same_time(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_are_asked = asyncio.Barrier(len(NAMES))
    probe = LocalRollout.probe

    async def waiting(self: LocalRollout) -> ProbeReply | None:
        await all_are_asked.wait()
        return await probe(self)

    monkeypatch.setattr(LocalRollout, "probe", waiting)
    async with asyncio.timeout(WAIT_S):
        reply = await replicas.fleet.probe()
    assert reply is not None and set(reply.by_replica) == set(NAMES)


async def test_a_replica_that_does_not_answer_the_known_prompt_is_taken_out(
    replicas: Replicas,
) -> None:
    broken = replicas.rollouts["replica-0"]
    broken.plan("probe", BackendError("vLLM did not respond"))
    reply = await replicas.fleet.probe()
    assert reply is not None and set(reply.by_replica) == {"replica-1", "replica-2"}
    await replicas.until(lambda: broken.num_launched == 2)
    broken.plan("probe", ActionFailed("it reports no log-probabilities"))
    await replicas.until_all_serve()
    with pytest.raises(ActionFailed, match="reports no log-probabilities"):
        await replicas.fleet.probe()


async def test_a_replica_that_dies_while_it_is_asked_for_the_known_prompt_is_taken_out(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's rollout cannot tell a lost connection from a refusal."""
    dying, failing = replicas.rollouts["replica-0"], replicas.rollouts["replica-1"]
    monkeypatch.setattr(dying, "health", _is_dead)
    dying.plan("probe", ActionFailed("ServerDisconnectedError"))
    failing.plan("probe", BackendError("vLLM did not respond"))
    reply = await replicas.fleet.probe()
    monkeypatch.undo()

    assert reply is not None and set(reply.by_replica) == {"replica-2"}
    await replicas.until(lambda: dying.num_launched == failing.num_launched == 2)


async def test_a_refusal_does_not_hide_that_another_replica_does_not_answer(
    replicas: Replicas,
) -> None:
    replicas.rollouts["replica-0"].plan("probe", ActionFailed("it reports no log-probabilities"))
    failing = replicas.rollouts["replica-1"]
    failing.plan("probe", BackendError("vLLM did not respond"))
    with pytest.raises(ActionFailed, match="reports no log-probabilities"):
        await replicas.fleet.probe()
    await replicas.until(lambda: failing.num_launched == 2)


async def _is_dead() -> bool:
    return False


async def test_the_kept_weights_are_removed_with_the_fleet(replicas: Replicas) -> None:
    await replicas.publish(1)
    kept = replicas.new_weights.parent / "kept"
    assert (kept / "theta.json").exists()
    await replicas.fleet.close()
    assert not kept.exists()
