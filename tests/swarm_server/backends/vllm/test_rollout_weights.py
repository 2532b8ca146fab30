"""New weights for an external vLLM: they arrive between calls, and no call is answered by weights
that are loaded only in part."""

from __future__ import annotations

import asyncio
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from swarm_server.backends.vllm.rollouts import ExternalVllm, complete

from fakevllm_server.backends.vllm.simulated_vllm import Fault
from fakevllm_server.types.backend import ActionFailed, BackendError
from fakevllm_server.types.weight_versions import GateAbandoned

pytestmark = pytest.mark.usefixtures("short_drain")


async def test_weights_are_replaced_during_a_pause_and_carry_their_version(
    external_vllm: ExternalVllm, weights: Path
) -> None:
    async with external_vllm() as (vllm, engine):
        endpoint = await vllm.launch()
        await vllm.load_weights(weights, 3)
        assert await complete(endpoint) == "trained"
        assert engine.control_requests == [
            "pause",
            "collective_rpc",
            "reset_prefix_cache",
            "update_weight_version",
            "resume",
        ]
        assert (endpoint.gate.version, engine.version) == (3, "3")


@pytest.mark.parametrize("fault", [Fault.NO_VERSION_ROUTE, Fault.VERSION_FAILS])
async def test_an_engine_that_records_no_version_takes_weights(
    external_vllm: ExternalVllm, weights: Path, fault: Fault
) -> None:
    async with external_vllm(fault) as (vllm, _):
        endpoint = await vllm.launch()
        await vllm.load_weights(weights, 1)
        assert await complete(endpoint) == "trained"


async def test_a_reload_that_fails_once_is_retried(
    external_vllm: ExternalVllm, weights: Path
) -> None:
    async with external_vllm(Fault.ONE_RELOAD_FAILS) as (vllm, engine):
        endpoint = await vllm.launch()
        await vllm.load_weights(weights, 1)
        assert await complete(endpoint) == "trained"
        assert engine.control_requests.count("collective_rpc") == 2


@pytest.mark.parametrize("fault", [Fault.RELOADS_FAIL, Fault.CACHE_STAYS])
async def test_after_a_failed_publish_calls_wait_until_a_publish_succeeds(
    external_vllm: ExternalVllm, weights: Path, fault: Fault
) -> None:
    async with external_vllm(fault) as (vllm, engine):
        endpoint = await vllm.launch()
        with pytest.raises(BackendError, match="did not take the weights"):
            await vllm.load_weights(weights, 1)
        assert engine.is_paused
        waiting = asyncio.create_task(complete(endpoint))
        engine.faults.clear()
        await vllm.load_weights(weights, 2)
        assert await waiting == "trained"


async def test_a_folder_that_the_external_server_cannot_see_is_an_error_that_names_weights_dir(
    external_vllm: ExternalVllm, tmp_path: Path
) -> None:
    async with external_vllm() as (vllm, _):
        await vllm.launch()
        with pytest.raises(BackendError, match="--weights-dir"):
            await vllm.load_weights(tmp_path / "elsewhere", 1)


async def test_an_engine_left_paused_by_a_failure_is_resumed_at_close(
    external_vllm: ExternalVllm, weights: Path
) -> None:
    async with external_vllm(Fault.RELOADS_FAIL) as (vllm, engine):
        await vllm.launch()
        with pytest.raises(BackendError):
            await vllm.load_weights(weights, 1)
        await vllm.close()
        assert not engine.is_paused


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault.NO_DEV_MODE, "VLLM_SERVER_DEV_MODE=1 in its environment"),
        (Fault.PAUSE_FAILS, "pause"),
    ],
)
async def test_if_vllm_cannot_be_paused_calls_continue_with_the_old_weights(
    external_vllm: ExternalVllm, weights: Path, fault: Fault, message: str
) -> None:
    async with external_vllm(fault) as (vllm, engine):
        endpoint = await vllm.launch()
        async with endpoint.gate.call() as stamp:
            with pytest.raises(ActionFailed, match=message) as failure:
                await vllm.load_weights(weights, 1)
        assert "--weights-dir" not in str(failure.value)
        assert (stamp.versions, stamp.is_doubtful) == ([0], False)
        assert await complete(endpoint) == "untrained"
        assert await vllm.health() and not engine.is_paused


async def test_an_engine_that_neither_pauses_nor_resumes_is_unhealthy_until_the_next_launch(
    external_vllm: ExternalVllm, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with external_vllm(Fault.PAUSE_FAILS, Fault.PAUSE_STAYS) as (vllm, engine):
        await vllm.launch()
        with pytest.raises(BackendError, match="was not paused"):
            await vllm.load_weights(weights, 1)
        assert not await vllm.health()
        assert re.search(
            r"may still be paused.*curl -X POST http://127.0.0.1:\d+/resume", caplog.text
        )
        engine.faults.clear()
        assert (await vllm.launch()).refusal is None
        assert await vllm.health()


async def test_a_pause_that_fails_after_a_failed_publish_does_not_resume_the_engine(
    external_vllm: ExternalVllm, weights: Path
) -> None:
    async with external_vllm(Fault.RELOADS_FAIL) as (vllm, engine):
        endpoint = await vllm.launch()
        with pytest.raises(BackendError):
            await vllm.load_weights(weights, 1)
        engine.faults = {Fault.PAUSE_FAILS}
        with pytest.raises(BackendError, match="was not paused"):
            await vllm.load_weights(weights, 2)
        assert engine.is_paused and not await vllm.health()
        waiting = asyncio.create_task(complete(endpoint))
        await vllm.close()
        with pytest.raises(GateAbandoned):
            await waiting


async def test_after_three_failed_publishes_in_a_row_the_server_is_unhealthy_until_the_next_launch(
    external_vllm: ExternalVllm, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with external_vllm(Fault.RELOADS_FAIL) as (vllm, engine):
        await vllm.launch()
        for version in (1, 2, 3):
            assert await vllm.health()
            assert "may still be paused" not in caplog.text
            with pytest.raises(BackendError):
                await vllm.load_weights(weights, version)
        assert not await vllm.health()
        assert "may still be paused" in caplog.text
        engine.faults.clear()
        endpoint = await vllm.launch()
        await vllm.load_weights(weights, 4)
        assert await vllm.health() and await complete(endpoint) == "trained"


async def test_a_successful_publish_resets_the_count_of_failures(
    external_vllm: ExternalVllm, weights: Path
) -> None:
    async with external_vllm() as (vllm, engine):
        await vllm.launch()
        for faults in [{Fault.RELOADS_FAIL}, {Fault.RELOADS_FAIL}, set[Fault]()] * 2:
            engine.faults = faults
            with pytest.raises(BackendError) if faults else nullcontext():
                await vllm.load_weights(weights, 1)
        assert await vllm.health()
