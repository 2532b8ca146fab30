"""vLLM as a Rollout: the launch and the loss of an external server, which is simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from swarm_server.backends.vllm.rollouts import ExternalVllm, complete

from fakevllm_server.backends.vllm import watchdog
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.backends.vllm.simulated_vllm import KEY, MAX_MODEL_LEN, Fault, SimulatedVllm
from fakevllm_server.types.backend import ActionFailed, BackendError, BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec
from fakevllm_server.types.known_prompt import ProbeReply

pytestmark = pytest.mark.usefixtures("short_drain")


async def test_a_correct_setup_can_be_trained_and_its_probe_results_are_written(
    external_vllm: ExternalVllm, tmp_path: Path
) -> None:
    async with external_vllm() as (vllm, _):
        endpoint = await vllm.launch()
        assert endpoint.refusal is None
        assert (endpoint.socket, endpoint.model_name) == (None, "simulated")
        assert endpoint.max_model_len == MAX_MODEL_LEN
        assert await vllm.health()
    results = json.loads((tmp_path / "engine_probes.json").read_text())
    assert {"token ids", "logprobs", "weight update"} <= {result["name"] for result in results}
    assert all(result["ok"] for result in results)


@pytest.mark.parametrize(
    ("fault", "refusal"),
    [
        (Fault.RAW_LOGPROBS, "--logprobs-mode processed_logprobs"),
        (Fault.NO_LOGPROBS, "returns 0 logprobs for 4 tokens"),
        (Fault.NO_TOKEN_IDS, "no token ids"),
        (Fault.NO_DEV_MODE, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
async def test_a_setup_that_cannot_be_trained_serves_and_names_the_fix(
    external_vllm: ExternalVllm, fault: Fault, refusal: str
) -> None:
    async with external_vllm(fault) as (vllm, _):
        endpoint = await vllm.launch()
        assert refusal in (endpoint.refusal or "")
        assert await complete(endpoint) == "untrained"


async def test_refused_tools_are_logged_and_do_not_prevent_training(
    external_vllm: ExternalVllm, caplog: pytest.LogCaptureFixture
) -> None:
    async with external_vllm(Fault.NO_TOOLS) as (vllm, _):
        assert (await vllm.launch()).refusal is None
    assert "--enable-auto-tool-choice --tool-call-parser NAME" in caplog.text


async def test_the_key_is_sent_and_a_missing_key_is_refused(external_vllm: ExternalVllm) -> None:
    async with external_vllm(Fault.WANTS_KEY, api_key=KEY) as (vllm, _):
        assert (await vllm.launch()).headers == {"Authorization": f"Bearer {KEY}"}
    async with external_vllm(Fault.WANTS_KEY) as (vllm, _):
        with pytest.raises(BackendRefused, match="--rollout-key-file"):
            await vllm.launch()


async def test_a_url_may_end_in_v1(external_vllm: ExternalVllm) -> None:
    async with external_vllm(path="/v1/") as (vllm, _):
        assert await complete(await vllm.launch()) == "untrained"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://nobody.invalid"])
async def test_an_unreachable_engine_is_not_refused_for_good(tmp_path: Path, url: str) -> None:
    vllm = VllmRollout(EngineSpec("vllm", tmp_path, None, "m", url=url))
    with pytest.raises(BackendError, match="--rollout-url") as unreachable:
        await vllm.launch()
    assert not isinstance(unreachable.value, BackendRefused)
    assert not await vllm.health()


@pytest.mark.parametrize("url", ["localhost:8000", "nonsense", "unix:///tmp/socket"])
async def test_an_invalid_url_is_refused(tmp_path: Path, url: str) -> None:
    vllm = VllmRollout(EngineSpec("vllm", tmp_path, None, "m", url=url))
    with pytest.raises(BackendRefused, match="--rollout-url"):
        await vllm.launch()


async def test_a_paused_engine_is_resumed_at_launch(external_vllm: ExternalVllm) -> None:
    async with external_vllm() as (vllm, engine):
        engine.is_paused = True
        await vllm.launch()
        assert not engine.is_paused


async def test_a_failed_publish_names_only_the_host_and_port_of_the_engine(
    external_vllm: ExternalVllm, weights: Path
) -> None:
    async with external_vllm(Fault.RELOADS_FAIL, path="/v1") as (vllm, _):
        await vllm.launch()
        with pytest.raises(BackendError, match=r"vLLM at 127\.0\.0\.1:\d+ did not take") as failure:
            await vllm.load_weights(weights, 1)
        assert "http" not in str(failure.value).replace("HTTP", "")


async def test_a_completion_that_fails_once_at_the_launch_is_not_a_lasting_refusal(
    external_vllm: ExternalVllm,
) -> None:
    async with external_vllm(Fault.ONE_COMPLETION_FAILS) as (vllm, _):
        with pytest.raises(BackendError, match="EngineCore is busy") as failure:
            await vllm.launch()
        assert not isinstance(failure.value, BackendRefused)
        assert (await vllm.launch()).refusal is None


async def test_the_known_prompt_is_requested_from_a_model_whose_number_of_layers_is_known(
    external_vllm: ExternalVllm, tmp_path: Path, weights: Path
) -> None:
    async with external_vllm() as (vllm, engine):
        assert await _probe_with(vllm, None) is None
        (tmp_path / "config.json").write_text('{"num_hidden_layers": 3}')
        first = await _probe_with(vllm, tmp_path)
        assert first is not None and (first.dtype, first.num_layers) == ("bfloat16", 3)
        assert len(first.log_probs) == len(first.ids) - 1 > 0
        await vllm.load_weights(weights, 1)
        assert engine.weights == "trained"
        changed = await vllm.probe()
        assert changed is not None and changed.ids == first.ids
        assert list(changed.log_probs) != list(first.log_probs)


async def test_a_vllm_that_reports_no_prompt_logprobs_fails_the_probe_and_not_the_engine(
    external_vllm: ExternalVllm, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3}')
    async with external_vllm(Fault.NO_LOGPROBS) as (vllm, _):
        with pytest.raises(ActionFailed, match="reports 0 prompt_logprobs for"):
            await _probe_with(vllm, tmp_path)
        assert await vllm.health()


async def _probe_with(vllm: VllmRollout, model: Path | None) -> ProbeReply | None:
    """Probe a vLLM whose model folder is `model`."""
    spec = vllm._spec  # pyright: ignore[reportPrivateUsage]
    vllm._spec = replace(spec, model=model and str(model))  # pyright: ignore[reportPrivateUsage]
    await vllm.launch()
    return await vllm.probe()


async def test_a_route_that_fails_at_the_launch_does_not_count_as_missing(
    tmp_path: Path,
) -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.Response(status=503)

    app = SimulatedVllm(tmp_path).app()
    app.router.add_get("/pause", busy)
    async with TestServer(app) as server:
        spec = EngineSpec("vllm", tmp_path, None, "simulated", url=str(server.make_url("/")))
        with pytest.raises(BackendError, match=r"failed at /pause \(HTTP 503"):
            await VllmRollout(spec).launch()


async def test_another_model_name_is_logged_and_does_not_prevent_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with TestServer(SimulatedVllm(tmp_path, "theirs").app()) as server:
        spec = EngineSpec("vllm", tmp_path, None, "ours", url=str(server.make_url("/")))
        vllm = VllmRollout(spec)
        endpoint = await vllm.launch()
        await vllm.close()
    assert (endpoint.model_name, endpoint.refusal) == ("theirs", None)
    assert "it serves no 'ours'; apps must use 'theirs'" in caplog.text


async def test_a_server_that_no_longer_responds_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "POLL_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "HEALTH_BOUND_S", 0.05)
    async with TestServer(SimulatedVllm(tmp_path).app()) as server:
        spec = EngineSpec("vllm", tmp_path, None, "m", url=str(server.make_url("/")))
        vllm = VllmRollout(spec)
        await vllm.launch()
    assert await vllm.lost() == "vLLM has not responded to /health for 0 s"
    assert not await vllm.health()
    assert await vllm.lost() == "vLLM is not running"
