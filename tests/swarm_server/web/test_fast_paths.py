"""The middleware that passes model calls to their endpoints without the router."""

from __future__ import annotations

import pytest

from fakevllm_adapters.http.asgi import AsgiApp, Receive, Scope, Send
from fakevllm_server.web.app import FastPaths

CHAT = "/v1/chat/completions"


class Reached:
    """Two ASGI apps that note which of them was called, and with which episode."""

    def __init__(self) -> None:
        self.app: str | None = None
        self.episode: str | None = None

    def named(self, name: str) -> AsgiApp:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            self.app = name
            self.episode = scope.get("path_params", {}).get("episode_uuid")

        return app


async def reach(method: str, path: str) -> Reached:
    async def receive() -> Scope:
        raise AssertionError("the middleware reads no body")

    async def send(message: Scope) -> None:
        raise AssertionError("the middleware answers nothing")

    reached = Reached()
    fast = FastPaths(reached.named("router"), {CHAT: reached.named("endpoint")})
    await fast({"type": "http", "method": method, "path": path}, receive, send)
    return reached


@pytest.mark.parametrize(("path", "episode"), [(CHAT, None), (f"/e/42{CHAT}", "42")])
async def test_a_model_call_reaches_its_endpoint_with_its_episode(
    path: str, episode: str | None
) -> None:
    reached = await reach("POST", path)
    assert (reached.app, reached.episode) == ("endpoint", episode)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", CHAT),
        ("POST", "/end_group"),
        ("POST", f"{CHAT}/"),
        ("POST", f"/e{CHAT}"),
        ("POST", f"/e/{CHAT}"),
        ("POST", "/e/42"),
        ("POST", f"/e/42/e/43{CHAT}"),
    ],
)
async def test_all_other_requests_reach_the_router(method: str, path: str) -> None:
    assert (await reach(method, path)).app == "router"
