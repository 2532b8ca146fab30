"""vLLM as a Rollout, with the stand-in: as somebody else's server, and as a child."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from backends.vllm.processes import api_process, running

from fakevllm_server.backends.base import ActionFailed, BackendError, BackendRefused, Endpoint
from fakevllm_server.backends.spec import EngineSpec
from fakevllm_server.backends.vllm import command, rollout, watchdog
from fakevllm_server.backends.vllm.command import Install
from fakevllm_server.backends.vllm.control import Control
from fakevllm_server.backends.vllm.rollout import VllmRollout, find_install
from fakevllm_server.backends.vllm.stand_in import KEY, MAX_MODEL_LEN, Fault, StandIn
from fakevllm_server.weight_gate import GateAbandoned

Remote = Callable[..., AbstractAsyncContextManager[tuple[VllmRollout, StandIn]]]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "DRAIN_BOUND_S", 0.05)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "weights.txt").write_text("trained")
    return folder


@pytest.fixture
def remote(tmp_path: Path) -> Remote:
    @asynccontextmanager
    async def serve(
        *faults: Fault, api_key: str | None = None, path: str = ""
    ) -> AsyncGenerator[tuple[VllmRollout, StandIn]]:
        engine = StandIn(tmp_path, faults=faults)
        async with TestServer(engine.app()) as server:
            url = str(server.make_url(path))
            spec = EngineSpec("vllm", tmp_path, None, "stand-in", url=url, api_key=api_key)
            vllm = VllmRollout(spec)
            try:
                yield vllm, engine
            finally:
                await vllm.close()

    return serve


@pytest.fixture
async def child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[Callable[..., VllmRollout]]:
    """Starts the stand-in where vLLM would be started."""
    program = (sys.executable, "-m", "fakevllm_server.backends.vllm.stand_in")
    monkeypatch.setattr(command, "VLLM", program)
    monkeypatch.setattr(rollout, "find_install", lambda: Install("0.27.1"))
    made: list[VllmRollout] = []

    def make(*faults: str) -> VllmRollout:
        arguments = [part for fault in faults for part in ("--fault", fault)]
        spec = EngineSpec("vllm", tmp_path, str(tmp_path), "stand-in", extra_args=arguments)
        made.append(VllmRollout(spec))
        return made[-1]

    yield make
    for vllm in made:
        await vllm.close()


async def said(endpoint: Endpoint) -> str:
    """What the engine answers, as an app is answered: through its gate."""
    connector = aiohttp.UnixConnector(str(endpoint.socket)) if endpoint.socket else None
    async with (
        aiohttp.ClientSession(endpoint.url, connector=connector) as app,
        endpoint.gate.call(),
        app.post("/v1/chat/completions", json={"messages": []}) as answer,
    ):
        return (await answer.json())["choices"][0]["message"]["content"]


# --- a server that somebody else runs


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


# --- a child


async def test_a_child_serves_takes_weights_and_leaves_nothing(
    child: Callable[..., VllmRollout], weights: Path
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    assert endpoint.refusal is None and endpoint.socket is not None
    assert endpoint.socket.stat().st_mode & 0o077 == 0
    await vllm.load_weights(weights, 1)
    assert await said(endpoint) == "trained"
    await vllm.close()
    assert not endpoint.socket.exists()


@pytest.mark.parametrize("fault", [Fault.RELOADS_FAIL, Fault.DIES_IN_RELOAD])
async def test_a_child_with_half_loaded_weights_is_ended_and_a_new_one_serves(
    child: Callable[..., VllmRollout], weights: Path, fault: Fault
) -> None:
    vllm = child(fault)
    first = await vllm.launch()
    with pytest.raises(BackendError, match="was ended"):
        await vllm.load_weights(weights, 1)
    assert not await vllm.health()
    second = await vllm.launch()
    assert second.gate is not first.gate
    assert await said(second) == "untrained"


async def test_who_waits_for_a_closed_engine_goes_to_the_next(
    child: Callable[..., VllmRollout],
) -> None:
    vllm = child()
    first = await vllm.launch()
    changing = first.gate.change(1, bound_s=0)
    await changing.__aenter__()
    waiting = asyncio.create_task(said(first))
    await vllm.close()
    with pytest.raises(GateAbandoned):
        await waiting
    assert await said(await vllm.launch()) == "untrained"
    with pytest.raises(GateAbandoned):
        await said(first)


async def test_a_close_that_is_cut_off_leaves_no_engine(
    child: Callable[..., VllmRollout],
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    assert endpoint.socket is not None
    engine = api_process(endpoint.socket)
    closing = asyncio.create_task(vllm.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await vllm.close()
    assert engine.pid not in {process.pid for process in running()}
    assert not endpoint.socket.exists() and not await vllm.health()


async def test_a_look_for_its_loss_that_is_cut_off_ends_a_hung_engine_all_the_same(
    child: Callable[..., VllmRollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    assert endpoint.socket is not None
    engine = api_process(endpoint.socket)
    ending = asyncio.Event()

    async def hangs(*_: object) -> str:
        ending.set()
        return "hangs"

    monkeypatch.setattr(rollout, "until_hung", hangs)
    lost = asyncio.create_task(vllm.lost())
    await ending.wait()
    while not lost.done() and await vllm.health():
        await asyncio.sleep(0)
    lost.cancel()
    await asyncio.gather(lost, return_exceptions=True)
    await vllm.close()
    assert engine.pid not in {process.pid for process in running()}


async def test_a_killed_child_is_lost_and_can_be_started_again(
    child: Callable[..., VllmRollout],
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    lost = asyncio.create_task(vllm.lost())
    assert endpoint.socket is not None
    os.kill(api_process(endpoint.socket).pid, signal.SIGKILL)
    assert await lost == "vLLM exited with code 137 (killed: out of memory?); see engine.log"
    assert not await vllm.health()
    assert await said(await vllm.launch()) == "untrained"


async def test_a_child_that_hangs_is_told_and_ended(
    child: Callable[..., VllmRollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = child()
    endpoint = await vllm.launch()
    monkeypatch.setattr(watchdog, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(watchdog, "TOKEN_BOUND_S", 0.2)
    control = Control(endpoint.url, endpoint.socket, {})
    assert (await control.post("/pause?mode=keep")).is_ok
    await control.close()
    calling = asyncio.create_task(said(endpoint))
    assert (await vllm.lost()).startswith("vLLM has sampled nothing for 0 s, with 1 call")
    assert not await vllm.health()
    with pytest.raises(aiohttp.ClientError):
        await calling


async def test_arguments_that_vllm_does_not_take_are_the_users_to_mend(
    child: Callable[..., VllmRollout],
) -> None:
    with pytest.raises(BackendRefused, match=r"exited with code 2: .*no-such-fault"):
        await child("no-such-fault").launch()


def test_without_vllm_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(BackendRefused, match=r"pip install -e '\.\[vllm\]'.*make_environment\.sh"):
        find_install()


async def test_an_untried_version_is_told_and_started_all_the_same(
    child: Callable[..., VllmRollout],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rollout, "find_install", lambda: Install("0.40.0"))
    await child().launch()
    assert "0.40.0 is untried: known are >=0.24,<0.32" in caplog.text
