"""New weights that the trainer sends to vLLM, and the sleep of vLLM during a step: the order of the
calls to a simulated vLLM, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from swarm_server.backends.vllm.rollouts import complete

from fakevllm_server.backends.process.rollout_trainer_pairs import TwoProcesses
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.backends.vllm.simulated_vllm import Fault
from fakevllm_server.backends.weight_transfer.socket_client import SocketClient
from fakevllm_server.types.backend import ActionFailed, BackendError, Endpoint
from fakevllm_server.types.weight_transfer import IPC, TransferTarget
from fakevllm_server.types.weight_versions import GateAbandoned

pytestmark = pytest.mark.usefixtures("short_drain")

RECOVERY = ["pause", "start_weight_update", "finish_weight_update"]
SERVE = ["reset_prefix_cache", "update_weight_version", "resume"]
FALL_ASLEEP = "sleep?level=1&mode=keep"
WEIGHTS_AWAKE = "wake_up?tags=weights"
CACHE_AWAKE = "wake_up?tags=kv_cache"
SERVE_AFTER_SLEEP = [*SERVE[:2], CACHE_AWAKE, "resume"]


class SendingTrainer:
    """A trainer that sends or exports the text `trained` as its weights."""

    def __init__(self, fails_after: int | None = None) -> None:
        self._fails_after = fails_after
        self.num_exports = 0
        self.target: TransferTarget | None = None

    async def send_weights(self, target: TransferTarget) -> None:
        self.target = target
        await asyncio.to_thread(self._send, SocketClient(target.socket))

    def _send(self, client: SocketClient) -> None:
        client.init_weight_transfer_engine({})
        client.start_weight_update()
        for number, piece in enumerate(("tra", "ined")):
            if number == self._fails_after:
                raise ActionFailed("the trainer stopped sending")
            client.update_weights({"weights": piece})
        client.finish_weight_update()

    async def export(self, folder: Path) -> None:
        self.num_exports += 1
        (folder / "weights.txt").write_text("trained")


class StuckTrainer(SendingTrainer):
    """A trainer that sends the first part of its weights and then nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = asyncio.Event()

    async def send_weights(self, target: TransferTarget) -> None:
        client = SocketClient(target.socket)
        await asyncio.to_thread(client.init_weight_transfer_engine, {})
        await asyncio.to_thread(client.start_weight_update)
        await asyncio.to_thread(client.update_weights, {"weights": "tra"})
        self.has_begun.set()
        await asyncio.Event().wait()


def pair(vllm: VllmRollout, trainer: SendingTrainer, folder: Path, **settings: Any) -> TwoProcesses:
    backend: Any = trainer
    return TwoProcesses(vllm, backend, folder / "new", transport="vllm", **settings)


async def control_requests(endpoint: Endpoint) -> list[str]:
    """Return the control routes that the simulated vLLM was asked for."""
    connector = aiohttp.UnixConnector(str(endpoint.socket))
    async with (
        aiohttp.ClientSession(endpoint.url, connector=connector) as session,
        session.get("/control_requests") as response,
    ):
        return await response.json()


@asynccontextmanager
async def waiting_call(endpoint: Endpoint) -> AsyncGenerator[asyncio.Task[str]]:
    """Begin a call, which must wait at the gate."""
    call = asyncio.create_task(complete(endpoint))
    await asyncio.sleep(0)
    yield call
    assert await call == "trained"


async def test_sent_weights_are_served_after_a_pause(
    child: Callable[..., VllmRollout], tmp_path: Path
) -> None:
    vllm, trainer = child(transport="vllm"), SendingTrainer()
    endpoint = await vllm.launch()
    await pair(vllm, trainer, tmp_path).publish(4)
    assert await complete(endpoint) == "trained"
    assert endpoint.gate.version == 4
    transfer = ["start_weight_update", "update_weights", "update_weights", "finish_weight_update"]
    before = ["pause", "init_weight_transfer_engine"]
    assert await control_requests(endpoint) == [*before, *transfer, *SERVE]
    assert trainer.target == TransferTarget(str(endpoint.socket), IPC)
    assert trainer.num_exports == 0


@pytest.mark.parametrize("fault", [None, Fault.TRANSFERS_FAIL])
async def test_after_a_failed_transfer_vllm_stays_paused_and_loads_the_folder(
    child: Callable[..., VllmRollout], tmp_path: Path, fault: Fault | None
) -> None:
    vllm = child(*filter(None, [fault]), transport="vllm")
    trainer = SendingTrainer(fails_after=1 if fault is None else None)
    endpoint = await vllm.launch()
    async with endpoint.gate.call() as running:
        await pair(vllm, trainer, tmp_path).publish(1)
    assert (running.versions, running.is_doubtful) == ([0, 1], False)
    assert await complete(endpoint) == "trained"
    requests = await control_requests(endpoint)
    assert requests[3:] == ["update_weights", *RECOVERY, "collective_rpc", *SERVE]
    assert trainer.num_exports == 1 and not (tmp_path / "new").exists()


async def test_if_transfer_and_folder_fail_vllm_is_ended_and_no_call_is_answered_by_it(
    child: Callable[..., VllmRollout], tmp_path: Path
) -> None:
    vllm = child(Fault.TRANSFERS_FAIL, Fault.RELOADS_FAIL, transport="vllm")
    endpoint = await vllm.launch()
    with pytest.raises(BackendError, match="did not take new weights and was ended"):
        await pair(vllm, SendingTrainer(), tmp_path).publish(1)
    assert not await vllm.health()
    assert endpoint.gate.version == 0


async def test_vllm_sleeps_during_a_step_and_calls_wait_for_the_new_weights(
    child: Callable[..., VllmRollout], tmp_path: Path
) -> None:
    vllm = child(transport="folder")
    backend = pair_by_folder(vllm, SendingTrainer(), tmp_path)
    endpoint = await vllm.launch()
    async with backend.training():
        assert await control_requests(endpoint) == [FALL_ASLEEP]
        async with waiting_call(endpoint) as call:
            await backend.publish(1)
    assert call.result() == "trained"
    requests = await control_requests(endpoint)
    assert requests[1:] == [WEIGHTS_AWAKE, "collective_rpc", *SERVE_AFTER_SLEEP]


async def test_a_sleeping_vllm_takes_sent_weights(
    child: Callable[..., VllmRollout], tmp_path: Path
) -> None:
    vllm = child(transport="vllm")
    backend = pair(vllm, SendingTrainer(), tmp_path, sleeps=True)
    endpoint = await vllm.launch()
    async with backend.training():
        await backend.publish(1)
    assert await complete(endpoint) == "trained"
    requests = await control_requests(endpoint)
    assert requests[:3] == [FALL_ASLEEP, WEIGHTS_AWAKE, "init_weight_transfer_engine"]
    assert requests[-4:] == SERVE_AFTER_SLEEP


async def test_a_failed_step_wakes_vllm_up_with_its_old_weights(
    child: Callable[..., VllmRollout], tmp_path: Path
) -> None:
    vllm = child()
    backend = pair_by_folder(vllm, SendingTrainer(), tmp_path)
    endpoint = await vllm.launch()
    waiting: list[asyncio.Task[str]] = []
    with pytest.raises(BackendError, match="the trainer died"):
        async with backend.training():
            waiting.append(asyncio.create_task(complete(endpoint)))
            raise BackendError("the trainer died")
    assert await waiting[0] == "untrained"
    assert endpoint.gate.version == 0
    requests = await control_requests(endpoint)
    assert requests == [FALL_ASLEEP, WEIGHTS_AWAKE, CACHE_AWAKE, "resume"]
    # The next step succeeds.
    async with backend.training():
        await backend.publish(1)
    assert await complete(endpoint) == "trained"


async def test_a_vllm_with_a_part_of_the_new_weights_does_not_wake_up(
    child: Callable[..., VllmRollout], tmp_path: Path
) -> None:
    vllm, trainer = child(transport="vllm"), StuckTrainer()
    endpoint = await vllm.launch()
    backend = pair(vllm, trainer, tmp_path, sleeps=True)

    async def step() -> None:
        async with backend.training():
            await backend.publish(1)

    step_task = asyncio.create_task(step())
    await trainer.has_begun.wait()
    step_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step_task
    assert not await vllm.health()
    with pytest.raises(GateAbandoned):
        await complete(endpoint)


async def test_running_calls_end_before_vllm_sleeps(
    child: Callable[..., VllmRollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fakevllm_server.backends.vllm.rollout.DRAIN_BOUND_S", 60.0)
    vllm = child()
    endpoint = await vllm.launch()
    async with endpoint.gate.call():
        falling_asleep = asyncio.create_task(vllm.sleep())
        await asyncio.sleep(0)
        assert await control_requests(endpoint) == []
    await falling_asleep
    assert await control_requests(endpoint) == [FALL_ASLEEP]


@pytest.mark.parametrize(
    ("fault", "message"),
    [(Fault.SLEEP_FAILS, "did not fall asleep"), (Fault.WAKE_UP_FAILS, "did not wake up")],
)
async def test_a_vllm_that_neither_sleeps_nor_wakes_is_ended_and_the_next_one_serves(
    child: Callable[..., VllmRollout], tmp_path: Path, fault: Fault, message: str
) -> None:
    vllm = child(fault)
    backend = pair_by_folder(vllm, SendingTrainer(), tmp_path)
    await vllm.launch()
    with pytest.raises(BackendError, match=f"{message} and was ended"):
        async with backend.training():
            pass
    assert not await vllm.health()
    assert await complete(await vllm.launch()) == "untrained"


async def test_a_vllm_without_memory_for_new_weights_is_ended(
    child: Callable[..., VllmRollout], tmp_path: Path
) -> None:
    vllm = child(Fault.WAKE_UP_FAILS)
    backend = pair_by_folder(vllm, SendingTrainer(), tmp_path)
    await vllm.launch()
    with pytest.raises(BackendError, match="could not be paused for new weights and was ended"):
        async with backend.training():
            await backend.publish(1)
    assert not await vllm.health()


def pair_by_folder(vllm: VllmRollout, trainer: SendingTrainer, folder: Path) -> TwoProcesses:
    """Return a pair whose vLLM sleeps during steps, and loads new weights from a folder."""
    backend: Any = trainer
    return TwoProcesses(vllm, backend, folder / "new", sleeps=True)
