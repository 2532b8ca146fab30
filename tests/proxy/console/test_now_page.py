"""The page Now with the server, its engines and the apps, and the page that pauses training. The
proxies, servers and engines are real, unless a test needs replies that no real server sends."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from fakevllm.config.key_file import KeyFile
from fakevllm.console.pages import now
from fakevllm.console.sources.server_status import ServerStatus
from fakevllm.console.sources.shared_reply import MAX_AGE_S
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.batch_status import PoolInformation
from fakevllm_adapters.protocol.keys import fingerprint, named_key
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.app import create_app as server_app
from tests.fuzz.in_process_stack import listening, running
from tests.proxy.console.console_rig import ABSENT_PROXY, open_console
from tests.proxy.console.test_pages import MARKUP, Elements, put
from tests.proxy.console.test_run_pages import open_swarm
from tests.proxy.ledger.ledger_cases import group
from tests.proxy.overwatch.cases import pool
from tests.proxy.scripted_swarm import ROLLING

METRICS = 'vllm:num_requests_running{engine="0"} 3\nvllm:num_requests_waiting{engine="0"} 2\n'
POOL = "get_current_batch_rollout_pool_information"
JSON = {"Content-Type": "application/json"}
CHAT: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "yes or no?"}]}


def text_of(html: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


# ------------------------------------------------------------------------- server and engines


async def test_a_real_server_shows_its_engine_its_load_its_version_and_its_start(
    tmp_path: Path,
) -> None:
    async with (
        running(tmp_path) as stack,
        open_console(
            tmp_path / "proxy" / "ledger.sqlite", proxy_url=stack.proxy, server_url=stack.server
        ) as rig,
    ):
        text = text_of(await rig.get("/"))
        assert "engine 0 serves requests (ROLLING) 0 0 0" in text
        assert f"address {stack.server}" in text
        assert "engine fake" in text and "The server was started" in text
    assert "No engine runs" not in text


async def test_a_server_without_an_engine_has_no_engine_in_the_table(
    path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    app = server_app(ServerConfig("fake", tmp_path / "server"))
    try:
        async with listening(app) as url, open_console(path, server_url=url) as rig:
            text = text_of(await rig.get("/"))
    finally:
        await app.state.server.close()
    assert "No engine runs." in text and "was started" in text


async def test_a_restart_of_the_server_leaves_a_trace(path: Path, ledger: Ledger) -> None:
    async with open_swarm() as swarm:
        for age_s, is_mentioned in ((7300, False), (130, True)):
            started = ROLLING.model_copy(update={"started_at": time.time() - age_s})
            swarm.answers["/get_engine_status"] = started
            async with open_console(path, server_url=swarm.url) as rig:
                text = text_of(await rig.get("/"))
            assert ("The server was started 2 min ago, at " in text) is is_mentioned
            assert ", 2 min ago" in text if is_mentioned else ", 2.0 h ago" in text


async def test_without_a_server_the_page_says_so_and_shows_everything_else(
    path: Path, ledger: Ledger
) -> None:
    put(ledger, group("g1", received_at=time.time()))
    async with open_console(path) as rig:
        html = await rig.get("/")
    assert f"No swarm server answers at {ABSENT_PROXY}" in html
    assert "<code>fakevllm-server start</code>" in html
    assert 'href="/groups/g1"' in html and "requests in the last 10 minutes" in html


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (401, "needs an API key: pass it with --swarm-key"),
        (500, "refused: status 500"),
        (404, "refused: "),
        ({"engine_status": "ENGINE.NEW"}, "no swarm server"),
        ([1], "refused: /get_engine_status was not answered by a swarm server"),
        ("<html><title>A router</title>", "A router"),
    ],
)
async def test_a_server_that_does_not_show_its_status_is_explained(
    answer: Any, words: str, path: Path, ledger: Ledger
) -> None:
    async with (
        open_swarm(get_engine_status=answer) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        assert words in await rig.get("/")


async def test_replies_with_strange_contents_are_one_sentence(path: Path, ledger: Ledger) -> None:
    strange = {"swarm_client_instruction": {"active_clients": 3}}
    async with (
        open_swarm(**{POOL: strange}) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        assert "is no swarm server" in await rig.get("/")


@pytest.mark.parametrize(
    ("metrics", "row"),
    [
        (METRICS, "engine 0 serves requests (ROLLING) 0 3 2"),
        (503, "engine serves requests (ROLLING) 0 – –"),
        ("vllm:num_requests_running{broken", "engine serves requests (ROLLING) 0 – –"),
        ("vllm:num_requests_running NaN", "engine serves requests (ROLLING) 0 – –"),
        ({"an": "object"}, "engine serves requests (ROLLING) 0 – –"),
    ],
)
async def test_the_load_is_that_of_the_metrics_or_unknown(
    metrics: Any, row: str, path: Path, ledger: Ledger
) -> None:
    async with (
        open_swarm(metrics=metrics) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        assert row in text_of(await rig.get("/"))


async def test_clients_with_episodes_are_listed(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(now, "MAX_CLIENTS", 1)
    async with (
        open_swarm(**{POOL: pool()}) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        text = text_of(await rig.get("/"))
    assert "f383a582b2af9eea 1" in text and "Clients that are not shown: 1." in text
    assert "batch of step 1 2 of 4 groups" in text


async def test_many_pages_share_one_status_until_it_is_old() -> None:
    clock = [0.0]
    async with open_swarm() as swarm:
        status = ServerStatus(swarm.url, None, lambda: clock[0])

        def views(num: int) -> None:
            for _ in range(num):
                status.view()

        await asyncio.to_thread(views, 5)
        assert swarm.calls["/get_engine_status"] == 1
        clock[0] += MAX_AGE_S + 1.0
        await asyncio.to_thread(views, 1)
        assert swarm.calls["/get_engine_status"] == 2


# ----------------------------------------------------------------------------------------- apps


async def test_the_requests_of_the_last_minutes_are_counted_by_app(
    path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    KeyFile(keys).add(named_key("secret", "alice", "2026-01-01"))
    at = time.time()
    alice = fingerprint("secret")
    put(
        ledger,
        *(replace(group(f"a{n}", received_at=at - n), app_key=alice) for n in range(3)),
        replace(group("b", received_at=at), app_key=None),
        replace(group("e", received_at=at), kind="eval", app_key="eval"),
        replace(group("old", received_at=at - 2 * now.TRAFFIC_S), app_key="old"),
    )
    async with open_console(path, app_keys=keys) as rig:
        html = await rig.get("/")
    section = text_of(html.partition("Apps in the last 10 minutes")[2].partition("</table>")[0])
    assert re.search(r"alice 3 \S+ \S+ no key 1 \S+ \S+$", section), section


async def test_only_the_newest_requests_are_counted_by_app(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(now, "MAX_COUNTED", 2)
    monkeypatch.setattr(now, "MAX_APPS", 1)
    at = time.time()
    put(ledger, *(replace(group(f"g{n}", received_at=at - n), app_key=f"k{n}") for n in range(3)))
    async with open_console(path) as rig:
        text = text_of(await rig.get("/"))
    assert "Apps that are not shown: 1." in text
    assert "Only the newest 2 requests are counted by app" in text


# ------------------------------------------------------------------------------ pause and resume


async def test_training_is_paused_and_resumed_with_two_clicks_each(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as stack,
        open_console(tmp_path / "proxy" / "ledger.sqlite", proxy_url=stack.proxy) as rig,
    ):
        assert ">Pause training</button>" in await rig.get("/")
        html = await rig.get("/training")
        assert 'action="/training/pause"' in html and "/training/resume" not in html
        data = {"form_token": await rig.form_token("/training")}
        reply = await rig.browser.post("/training/pause", data=data)
        assert reply.status_code == 200 and "this survives a restart" in reply.text
        assert 'action="/training/resume"' in reply.text
        assert (tmp_path / "proxy" / "paused").exists()
        html = await rig.get("/")
        assert "Training is paused" in html and '<a class="nowrap" href="/training">' in html
        answer = await stack.send(f"{stack.proxy}/v1/chat/completions", orjson.dumps(CHAT), JSON)
        assert answer.status == 200
        reply = await rig.browser.post("/training/resume", data=data)
        assert reply.status_code == 200 and "requests are fanned out" in reply.text
        assert not (tmp_path / "proxy" / "paused").exists()
        assert "Training is paused" not in await rig.get("/")


async def test_a_pause_without_the_form_token_or_a_login_changes_nothing(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as stack,
        open_console(tmp_path / "proxy" / "ledger.sqlite", proxy_url=stack.proxy) as rig,
    ):
        token = await rig.form_token("/training")
        for action in ("pause", "resume"):
            for wrong in ("", "0" * 64):
                reply = await rig.browser.post(f"/training/{action}", data={"form_token": wrong})
                assert reply.status_code == 403
            # The address of a form is not a page.
            assert (await rig.browser.get(f"/training/{action}")).status_code == 303
        rig.browser.cookies.clear()
        reply = await rig.browser.post("/training/pause", data={"form_token": token})
        assert reply.status_code in (401, 403)
        assert (await rig.browser.get("/training")).status_code == 401
        assert not (tmp_path / "proxy" / "paused").exists()


async def test_a_pause_that_the_proxy_refuses_is_explained(path: Path, ledger: Ledger) -> None:
    refusal = {"detail": "This needs an admin's key: <b>"}
    async with open_swarm(**{"fakevllm/pause": refusal}) as swarm:
        swarm.statuses["/fakevllm/pause"] = 403
        async with open_console(path, proxy_url=swarm.url) as rig:
            data = {"form_token": await rig.form_token("/")}
            reply = await rig.browser.post("/training/pause", data=data)
    assert reply.status_code == 409
    assert "This needs an admin&#39;s key: &lt;b&gt;" in reply.text


async def test_a_pause_that_will_not_survive_a_restart_says_so(path: Path, ledger: Ledger) -> None:
    trouble = {"paused": True, "trouble": "the disk is full"}
    async with (
        open_swarm(**{"fakevllm/pause": trouble}) as swarm,
        open_console(path, proxy_url=swarm.url) as rig,
    ):
        data = {"form_token": await rig.form_token("/")}
        reply = await rig.browser.post("/training/pause", data=data)
    assert "will not survive a restart of the proxy: the disk is full" in reply.text


async def test_without_a_proxy_there_is_nothing_to_pause(path: Path, ledger: Ledger) -> None:
    async with open_console(path) as rig:
        html = await rig.get("/training")
        assert "No fakevllm proxy answers" in html and "<form" not in html.partition("<main>")[2]
        assert "Pause training" not in await rig.get("/")


# --------------------------------------------------------------------------------------- markup


@pytest.mark.parametrize("text", MARKUP)
async def test_markup_in_replies_of_the_server_is_shown_as_text(
    text: str, path: Path, ledger: Ledger
) -> None:
    put(ledger, replace(group("g1", received_at=time.time()), app_key=text))
    status = ROLLING.model_copy(
        update={"rollout": text, "trainer": f"{text}2", "closed": text, "started_at": time.time()}
    )
    clients = {"active_clients": [{"client_uuid": text, "last_activity_at": text}]}
    batch = PoolInformation(swarm_client_instruction=clients)
    label = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    metrics = f'vllm:num_requests_running{{engine="{label}"}} 1\n'
    answers: dict[str, Any] = {POOL: batch, "metrics": metrics}
    async with (
        open_swarm(get_engine_status=status, **answers) as swarm,
        open_console(path, server_url=swarm.url) as rig,
    ):
        for headers in ({}, {"hx-request": "true"}):
            html = (await rig.browser.get("/", headers=headers)).text
            elements = Elements()
            elements.feed(html)
            assert elements.unexpected == []
    visible = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    visible = visible.replace("'", "&#39;").replace('"', "&#34;")
    assert html.count(visible) >= 4
