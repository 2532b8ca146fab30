"""A load balancer divides the requests of one `--rollout-url` among several engines."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp.test_utils import TestServer

from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.backends.vllm.simulated_vllm import SimulatedVllm
from fakevllm_server.types.engine_spec import EngineSpec
from tests.e2e.round_robin_relay import round_robin_relay


@pytest.mark.parametrize("num_engines", [2, 3, 4])
async def test_no_engine_stays_paused_after_new_weights_and_the_probe_sees_different_weights(
    tmp_path: Path, weights: Path, num_engines: int
) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3}')
    engines = [SimulatedVllm(tmp_path) for _ in range(num_engines)]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(TestServer(each.app())) for each in engines]
        ports = [server.port for server in servers]
        port = await stack.enter_async_context(round_robin_relay([*filter(None, ports)]))
        url = f"http://127.0.0.1:{port}"
        vllm = VllmRollout(EngineSpec("vllm", tmp_path, str(tmp_path), "simulated", url=url))
        stack.push_async_callback(vllm.close)
        await vllm.launch()
        await vllm.load_weights(weights, 1)
        assert [engine.is_paused for engine in engines] == [False] * num_engines
        assert [engine.weights for engine in engines].count("trained") == 1
        reply = await vllm.probe()
        assert reply is not None
        assert len({tuple(each) for each in (reply.log_probs, *reply.repeated)}) == 2
