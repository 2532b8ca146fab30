"""New weights for a vLLM that somebody else runs: they arrive between calls, and nobody is
answered by half of them."""

from __future__ import annotations

import asyncio
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from swarm_server.backends.vllm.rollouts import Remote, said

from fakevllm_server.backends.vllm.stand_in import Fault
from fakevllm_server.types.backend import ActionFailed, BackendError
from fakevllm_server.types.weight_gate import GateAbandoned

pytestmark = pytest.mark.usefixtures("no_waiting")


async def test_weights_change_while_nothing_is_sampled_and_carry_their_version(
    remote: Remote, weights: Path
) -> None:
    async with remote() as (vllm, engine):
        endpoint = await vllm.launch()
        await vllm.load_weights(weights, 3)
        assert await said(endpoint) == "trained"
        assert engine.acts == [
            "pause",
            "collective_rpc",
            "reset_prefix_cache",
            "update_weight_version",
            "resume",
        ]
        assert (endpoint.gate.version, engine.version) == (3, "3")


@pytest.mark.parametrize("fault", [Fault.NO_VERSION_ROUTE, Fault.VERSION_FAILS])
async def test_an_engine_that_keeps_no_version_takes_weights_all_the_same(
    remote: Remote, weights: Path, fault: Fault
) -> None:
    async with remote(fault) as (vllm, _):
        endpoint = await vllm.launch()
        await vllm.load_weights(weights, 1)
        assert await said(endpoint) == "trained"


async def test_a_reload_that_fails_once_is_tried_again(remote: Remote, weights: Path) -> None:
    async with remote(Fault.ONE_RELOAD_FAILS) as (vllm, engine):
        endpoint = await vllm.launch()
        await vllm.load_weights(weights, 1)
        assert await said(endpoint) == "trained"
        assert engine.acts.count("collective_rpc") == 2


@pytest.mark.parametrize("fault", [Fault.RELOADS_FAIL, Fault.CACHE_STAYS])
async def test_after_weights_that_did_not_arrive_nobody_is_answered_until_others_do(
    remote: Remote, weights: Path, fault: Fault
) -> None:
    async with remote(fault) as (vllm, engine):
        endpoint = await vllm.launch()
        with pytest.raises(BackendError, match="did not take the weights"):
            await vllm.load_weights(weights, 1)
        assert engine.is_paused
        waiting = asyncio.create_task(said(endpoint))
        engine.faults.clear()
        await vllm.load_weights(weights, 2)
        assert await waiting == "trained"


async def test_a_folder_that_the_other_server_cannot_see_is_told(
    remote: Remote, tmp_path: Path
) -> None:
    async with remote() as (vllm, _):
        await vllm.launch()
        with pytest.raises(BackendError, match="--weights-dir"):
            await vllm.load_weights(tmp_path / "elsewhere", 1)


async def test_an_engine_left_paused_by_a_failure_goes_on_once_the_server_leaves(
    remote: Remote, weights: Path
) -> None:
    async with remote(Fault.RELOADS_FAIL) as (vllm, engine):
        await vllm.launch()
        with pytest.raises(BackendError):
            await vllm.load_weights(weights, 1)
        await vllm.close()
        assert not engine.is_paused


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault.NO_DEV_MODE, "VLLM_SERVER_DEV_MODE=1 in its environment"),
        (Fault.PAUSE_FAILS, "pause"),
    ],
)
async def test_where_vllm_is_not_paused_calls_go_on_with_the_weights_they_had(
    remote: Remote, weights: Path, fault: Fault, told: str
) -> None:
    async with remote(fault) as (vllm, engine):
        endpoint = await vllm.launch()
        async with endpoint.gate.call() as stamp:
            with pytest.raises(ActionFailed, match=told) as failure:
                await vllm.load_weights(weights, 1)
        assert "--weights-dir" not in str(failure.value)
        assert (stamp.versions, stamp.is_doubtful) == ([0], False)
        assert await said(endpoint) == "untrained"
        assert await vllm.health() and not engine.is_paused


async def test_one_that_neither_pauses_nor_resumes_is_reached_anew(
    remote: Remote, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with remote(Fault.PAUSE_FAILS, Fault.PAUSE_STAYS) as (vllm, engine):
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


async def test_a_pause_that_fails_after_weights_that_did_not_arrive_opens_nothing(
    remote: Remote, weights: Path
) -> None:
    async with remote(Fault.RELOADS_FAIL) as (vllm, engine):
        endpoint = await vllm.launch()
        with pytest.raises(BackendError):
            await vllm.load_weights(weights, 1)
        engine.faults = {Fault.PAUSE_FAILS}
        with pytest.raises(BackendError, match="was not paused"):
            await vllm.load_weights(weights, 2)
        assert engine.is_paused and not await vllm.health()
        waiting = asyncio.create_task(said(endpoint))
        await vllm.close()
        with pytest.raises(GateAbandoned):
            await waiting


async def test_after_three_publishes_in_a_row_that_failed_the_server_is_reached_anew(
    remote: Remote, weights: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with remote(Fault.RELOADS_FAIL) as (vllm, engine):
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
        assert await vllm.health() and await said(endpoint) == "trained"


async def test_a_publish_that_went_well_begins_the_count_of_failures_anew(
    remote: Remote, weights: Path
) -> None:
    async with remote() as (vllm, engine):
        await vllm.launch()
        for faults in [{Fault.RELOADS_FAIL}, {Fault.RELOADS_FAIL}, set[Fault]()] * 2:
            engine.faults = faults
            with pytest.raises(BackendError) if faults else nullcontext():
                await vllm.load_weights(weights, 1)
        assert await vllm.health()
