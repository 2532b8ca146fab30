"""vLLM as a Rollout, with the stand-in: as somebody else's server, and as a child."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from swarm_server.backends.vllm.rollouts import Remote, said

from fakevllm_server.backends.vllm import watchdog
from fakevllm_server.backends.vllm.rollout import VllmRollout
from fakevllm_server.backends.vllm.stand_in import KEY, MAX_MODEL_LEN, Fault, StandIn
from fakevllm_server.types.backend import BackendError, BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec

pytestmark = pytest.mark.usefixtures("no_waiting")


async def test_an_engine_set_up_well_is_trained_and_what_was_found_is_kept(
    remote: Remote, tmp_path: Path
) -> None:
    async with remote() as (vllm, _):
        endpoint = await vllm.launch()
        assert endpoint.refusal is None
        assert (endpoint.socket, endpoint.model_name) == (None, "stand-in")
        assert endpoint.max_model_len == MAX_MODEL_LEN
        assert await vllm.health()
    found = json.loads((tmp_path / "engine_probes.json").read_text())
    assert {"token ids", "logprobs", "weight update"} <= {verdict["name"] for verdict in found}
    assert all(verdict["ok"] for verdict in found)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault.RAW_LOGPROBS, "--logprobs-mode processed_logprobs"),
        (Fault.NO_LOGPROBS, "returns 0 logprobs for 4 tokens"),
        (Fault.NO_TOKEN_IDS, "no token ids"),
        (Fault.NO_DEV_MODE, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
async def test_one_that_cannot_be_trained_with_serves_and_says_what_to_mend(
    remote: Remote, fault: Fault, told: str
) -> None:
    async with remote(fault) as (vllm, _):
        endpoint = await vllm.launch()
        assert told in (endpoint.refusal or "")
        assert await said(endpoint) == "untrained"


async def test_refused_tools_are_told_and_do_not_keep_it_from_training(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    async with remote(Fault.NO_TOOLS) as (vllm, _):
        assert (await vllm.launch()).refusal is None
    assert "--enable-auto-tool-choice --tool-call-parser NAME" in caplog.text


async def test_a_key_is_sent_and_one_that_is_missing_is_asked_for(remote: Remote) -> None:
    async with remote(Fault.WANTS_KEY, api_key=KEY) as (vllm, _):
        assert (await vllm.launch()).headers == {"Authorization": f"Bearer {KEY}"}
    async with remote(Fault.WANTS_KEY) as (vllm, _):
        with pytest.raises(BackendRefused, match="--rollout-key-file"):
            await vllm.launch()


async def test_a_url_may_end_as_clients_write_it(remote: Remote) -> None:
    async with remote(path="/v1/") as (vllm, _):
        assert await said(await vllm.launch()) == "untrained"


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://nobody.invalid"])
async def test_an_engine_that_cannot_be_reached_may_come_later(tmp_path: Path, url: str) -> None:
    vllm = VllmRollout(EngineSpec("vllm", tmp_path, None, "m", url=url))
    with pytest.raises(BackendError, match="--rollout-url") as unreachable:
        await vllm.launch()
    assert not isinstance(unreachable.value, BackendRefused)
    assert not await vllm.health()


@pytest.mark.parametrize("url", ["localhost:8000", "nonsense", "unix:///tmp/socket"])
async def test_what_is_no_url_is_refused(tmp_path: Path, url: str) -> None:
    vllm = VllmRollout(EngineSpec("vllm", tmp_path, None, "m", url=url))
    with pytest.raises(BackendRefused, match="--rollout-url"):
        await vllm.launch()


async def test_one_left_paused_goes_on(remote: Remote) -> None:
    async with remote() as (vllm, engine):
        engine.is_paused = True
        await vllm.launch()
        assert not engine.is_paused


async def test_what_reaches_apps_names_host_and_port_only(remote: Remote, weights: Path) -> None:
    async with remote(Fault.RELOADS_FAIL, path="/v1") as (vllm, _):
        await vllm.launch()
        with pytest.raises(BackendError, match=r"vLLM at 127\.0\.0\.1:\d+ did not take") as failure:
            await vllm.load_weights(weights, 1)
        assert "http" not in str(failure.value).replace("HTTP", "")


async def test_one_completion_that_fails_at_the_start_is_no_lasting_refusal(
    remote: Remote,
) -> None:
    async with remote(Fault.ONE_COMPLETION_FAILS) as (vllm, _):
        with pytest.raises(BackendError, match="EngineCore is busy") as failure:
            await vllm.launch()
        assert not isinstance(failure.value, BackendRefused)
        assert (await vllm.launch()).refusal is None


async def test_a_route_that_fails_at_the_start_is_not_taken_for_one_that_lacks(
    tmp_path: Path,
) -> None:
    async def busy(_: web.Request) -> web.Response:
        return web.Response(status=503)

    app = StandIn(tmp_path).app()
    app.router.add_get("/pause", busy)
    async with TestServer(app) as server:
        spec = EngineSpec("vllm", tmp_path, None, "stand-in", url=str(server.make_url("/")))
        with pytest.raises(BackendError, match=r"failed at /pause \(HTTP 503"):
            await VllmRollout(spec).launch()


async def test_a_name_that_is_not_served_is_told_and_refuses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with TestServer(StandIn(tmp_path, "theirs").app()) as server:
        spec = EngineSpec("vllm", tmp_path, None, "ours", url=str(server.make_url("/")))
        vllm = VllmRollout(spec)
        endpoint = await vllm.launch()
        await vllm.close()
    assert (endpoint.model_name, endpoint.refusal) == ("theirs", None)
    assert "it serves no 'ours'; apps must use 'theirs'" in caplog.text


async def test_a_server_that_vanishes_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(watchdog, "HEALTH_BOUND_S", 0.05)
    async with TestServer(StandIn(tmp_path).app()) as server:
        spec = EngineSpec("vllm", tmp_path, None, "m", url=str(server.make_url("/")))
        vllm = VllmRollout(spec)
        await vllm.launch()
    assert await vllm.lost() == "vLLM has not answered /health for 0 s"
    assert not await vllm.health()
    assert await vllm.lost() == "vLLM is not running"
