"""Web pages and desktop apps of other origins: preflights, requests, and the setting for them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from fakevllm.config.model import load
from fakevllm.web.app import create_app
from fakevllm.web.proxy_components import open_proxy
from tests.proxy.scripted_swarm import ScriptedSwarm

CHAT = "/v1/chat/completions"
OBSIDIAN = "app://obsidian.md"
LOCAL_PAGE = "http://localhost:3000"
EVIL = "https://evil.example"
MODELS = {"data": [{"id": "fake"}]}


@asynccontextmanager
async def open_client(
    folder: Path, *origins: str, keys: str | None = None
) -> AsyncGenerator[httpx.AsyncClient]:
    """Yield a client of a proxy with these allowed origins."""
    proxy_flags: dict[str, Any] = {"run_dir": folder, "allowed_origins": origins}
    if keys is not None:
        proxy_flags["key_file"] = folder / "app_keys"
        (folder / "app_keys").write_text(keys)
    async with ScriptedSwarm() as swarm:
        swarm.answers["/v1/models"] = MODELS
        flags = {"proxy": proxy_flags, "swarm": {"url": swarm.url}, "upstream": {"hold_s": 0}}
        async with open_proxy(load(None, flags)) as proxy:
            transport = httpx.ASGITransport(create_app(proxy))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as app:
                yield app


def preflight(origin: str, **more: str) -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
        **more,
    }


def allowed_origin(reply: httpx.Response) -> str | None:
    return reply.headers.get("access-control-allow-origin")


@pytest.mark.parametrize("origin", [OBSIDIAN, LOCAL_PAGE])
async def test_a_preflight_of_an_allowed_origin_is_accepted(tmp_path: Path, origin: str) -> None:
    async with open_client(tmp_path, OBSIDIAN, LOCAL_PAGE, keys="sk-one\n") as app:
        reply = await app.options(CHAT, headers=preflight(origin))
        private = preflight(origin, **{"Access-Control-Request-Private-Network": "true"})
        local_network = await app.options(CHAT, headers=private)
    assert (reply.status_code, allowed_origin(reply)) == (200, origin)
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"].endswith("x-stainless-os")
    assert "Origin" in reply.headers["vary"]
    assert local_network.headers["access-control-allow-private-network"] == "true"


async def test_a_page_of_an_allowed_origin_can_read_answers_and_errors(tmp_path: Path) -> None:
    async with open_client(tmp_path, OBSIDIAN, keys="sk-one\n") as app:
        headers = {"Origin": OBSIDIAN, "Authorization": "Bearer sk-one"}
        models = await app.get("/v1/models", headers=headers)
        invalid = await app.post(CHAT, content=b"{", headers=headers)
        no_key = await app.post(CHAT, json={}, headers={"Origin": OBSIDIAN})
    assert models.json() == MODELS and no_key.status_code == 401
    for reply in (models, invalid, no_key):
        assert allowed_origin(reply) == OBSIDIAN
        assert reply.headers.get_list("access-control-allow-origin") == [OBSIDIAN]
        assert "Origin" in reply.headers["vary"]
        assert reply.headers["access-control-expose-headers"] == "*"


@pytest.mark.parametrize(
    "origin", [EVIL, f"{OBSIDIAN}.evil", "http://localhost:3001", "APP://obsidian.md", "null"]
)
async def test_an_origin_that_differs_from_the_allowed_ones_can_read_nothing(
    tmp_path: Path, origin: str
) -> None:
    async with open_client(tmp_path, OBSIDIAN, LOCAL_PAGE) as app:
        refused = await app.options(CHAT, headers=preflight(origin))
        models = await app.get("/v1/models", headers={"Origin": origin})
    assert (refused.status_code, refused.text) == (400, "Disallowed CORS origin")
    assert allowed_origin(refused) is None and allowed_origin(models) is None


@pytest.mark.parametrize("path", ["/fakevllm/pause", "/fakevllm/tasks", "/tokenize", "/v1"])
async def test_other_paths_stay_closed_to_allowed_origins(tmp_path: Path, path: str) -> None:
    async with open_client(tmp_path, "*", keys="sk-one\n") as app:
        headers = {"Origin": EVIL, "Authorization": "Bearer sk-one"}
        reply = await app.post(path, json={}, headers=headers)
        assert reply.status_code == 403 and "proxy.allowed_origins" not in reply.text
        assert (await app.options(path, headers=preflight(EVIL))).status_code == 400
        assert allowed_origin(await app.get("/fakevllm/stats", headers=headers)) is None


async def test_the_wildcard_allows_every_origin_with_a_key(tmp_path: Path) -> None:
    async with open_client(tmp_path, "*", keys="sk-one\n") as app:
        webview = "vscode-webview://1abc"
        assert (await app.options(CHAT, headers=preflight(webview))).status_code == 200
        no_key = await app.post(CHAT, json={}, headers={"Origin": webview})
    assert (no_key.status_code, allowed_origin(no_key)) == (401, "*")


async def test_one_log_line_about_refused_origins_names_the_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fakevllm.web.cors"):
        async with open_client(tmp_path) as app:
            refused = await app.post(CHAT, json={}, headers={"Origin": OBSIDIAN})
            for number in range(50):
                await app.options(CHAT, headers=preflight(f"http://localhost:{number}"))
    assert refused.status_code == 403
    assert "add it to `proxy.allowed_origins`" in refused.json()["error"]["message"]
    (line,) = [one.getMessage() for one in caplog.records if one.name == "fakevllm.web.cors"]
    assert OBSIDIAN in line and "proxy.allowed_origins" in line
