"""Access checks on hosts, origins and keys, and the middleware that applies them."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from fakevllm_adapters.http.access_guard import OPEN_PATHS, Guard, GuardMiddleware, is_loopback
from fakevllm_adapters.http.asgi import (
    AsgiApp,
    Receive,
    Scope,
    Send,
)
from fakevllm_adapters.protocol.errors import WireError, unauthorized
from fakevllm_adapters.protocol.keys import KeyRing, Role, named_key
from tests.adapters.http.guarded import KEYED, OPEN, client_of, echo_app

# --- Host and Origin


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST", "[::1]:8000"])
def test_loopback_names_are_served(host: str) -> None:
    assert OPEN.refusal("POST", "/v1/x", host, None, None) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "", "[", "[::1", "x@localhost", "localhost/v1?"],
)
def test_a_host_name_other_than_the_allowed_ones_is_refused(host: str) -> None:
    refusal = OPEN.refusal("GET", "/v1/x", host, None, None)
    assert refusal is not None and refusal.status == 403


def test_a_post_from_a_foreign_origin_is_refused_and_from_an_allowed_origin_accepted() -> None:
    foreign = OPEN.refusal("POST", "/start_engine", "localhost", "https://evil.example", None)
    assert foreign is not None and foreign.status == 403
    assert OPEN.refusal("POST", "/x", "localhost", "http://localhost:3000", None) is None
    for odd in ("null", "http://[", ""):
        assert OPEN.refusal("POST", "/x", "localhost", odd, None) is not None


@given(st.text(max_size=30), st.text(max_size=30))
def test_any_host_and_origin_are_accepted_or_refused_with_a_short_message(
    host: str, origin: str
) -> None:
    refusal = OPEN.refusal("POST", "/v1/x", host, origin, None)
    assert refusal is None or (refusal.status == 403 and len(refusal.message) < 1000)


def test_only_loopback_addresses_and_localhost_are_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "", "127.evil.example", "10.0.0.1")))


# --- keys


def test_every_path_but_the_open_ones_needs_a_key() -> None:
    for path in OPEN_PATHS:
        assert KEYED.refusal("GET", path, "localhost", None, None) is None
    for path in ("/v1/models", "/version", "/metrics", "/tokenize", "/nothing", "/", ""):
        assert KEYED.refusal("GET", path, "localhost", None, "sk-one") is None
        for key in (None, "sk-two", ""):
            refusal = KEYED.refusal("GET", path, "localhost", None, key)
            assert refusal is not None and refusal.status == 401


@pytest.mark.parametrize(
    "path",
    ["/health/", "//health", "/health/../v1/models", "/v1/models?/health", "/HEALTH", "/pin"],
)
def test_a_path_that_only_resembles_an_open_path_needs_a_key(path: str) -> None:
    refusal = KEYED.refusal("GET", path, "localhost", None, None)
    assert refusal is not None and refusal.status == 401


@given(st.text(max_size=20), st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "BREW"]))
def test_no_path_and_method_bypass_the_key_check(path: str, method: str) -> None:
    refusal = KEYED.refusal(method, path, "localhost", None, None)
    assert path in OPEN_PATHS or (refusal is not None and refusal.status == 401)


def test_an_extra_key_is_accepted_only_for_its_paths() -> None:
    guard = Guard(
        KeyRing(["sk-one"]),
        accepts_extra_key=lambda key, path: key == "sk-episode" and path.startswith("/v1/"),
    )
    assert guard.refusal("POST", "/v1/x", "localhost", None, "sk-episode") is None
    refusal = guard.refusal("POST", "/stop_engine", "localhost", None, "sk-episode")
    assert refusal is not None and refusal.status == 401


def test_admin_paths_answer_clients_with_403_and_invalid_keys_with_401() -> None:
    guard = Guard(
        KeyRing([named_key("sk-c", "c", "today", Role.CLIENT), named_key("sk-a", "a", "today")]),
        admin_paths={"/stop"},
    )
    assert guard.refusal("POST", "/stop", "localhost", None, "sk-a") is None
    assert guard.refusal("POST", "/other", "localhost", None, "sk-c") is None
    refusal = guard.refusal("POST", "/stop", "localhost", None, "sk-c")
    assert refusal is not None and refusal.status == 403
    assert refusal.body == {
        "detail": "/stop is for admins, and the key of c has the role client: ask an admin, or "
        "show a key made with `fakevllm keys add NAME --role admin`."
    }
    for key, name in (("sk-x", None), (None, None), ("sk-a", "c")):
        refusal = guard.refusal("POST", "/stop", "localhost", None, key, name)
        assert refusal is not None and refusal.status == 401
    assert Guard(admin_paths={"/stop"}).refusal("POST", "/stop", "localhost", None, None) is None


def test_the_error_for_an_invalid_key_can_be_replaced() -> None:
    late = WireError(404, {"detail": "late"})
    guard = Guard(
        KeyRing(["sk-one"]), invalid_key_error=lambda key, _: late if key else unauthorized()
    )
    assert guard.refusal("POST", "/x", "localhost", None, "sk-old") is late
    refusal = guard.refusal("POST", "/x", "localhost", None, None)
    assert refusal is not None and refusal.status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer sk-one"}, 200),
        ({"authorization": "bearer sk-one"}, 200),
        ({"x-api-key": "sk-one"}, 200),
        ({"authorization": "Basic sk-one", "x-api-key": "sk-one"}, 200),
        ({}, 401),
        ({"authorization": "sk-one"}, 401),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer sk-on"}, 401),
        ({"authorization": "Bearer sk-one2"}, 401),
        ({"x-api-key": ""}, 401),
        ({"authorization": b"Bearer \xff\xfe"}, 401),
        ({"api-key": "sk-one"}, 401),
        ({"cookie": "x-api-key=sk-one"}, 401),
    ],
)
async def test_a_key_is_read_from_a_bearer_token_or_x_api_key(
    headers: dict[str, Any], status: int
) -> None:
    async with client_of(GuardMiddleware(echo_app, KEYED)) as app:
        answer = await app.post("/v1/chat/completions", headers=headers, content=b"{}")
    assert answer.status_code == status


async def test_the_401_equals_vllms_and_is_sent_before_the_body_is_read() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("the body was read without a key")

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/x",
        "headers": [(b"host", b"localhost")],
    }
    await GuardMiddleware(echo_app, KEYED)(scope, receive, send)
    assert sent[0]["status"] == 401 and sent[1]["body"] == b'{"error":"Unauthorized"}'
    headers = dict(sent[0]["headers"])
    assert headers == {b"content-type": b"application/json", b"content-length": b"24"}


async def test_the_routed_path_decides_and_headers_that_name_another_path_do_not() -> None:
    headers = {
        "x-original-url": "/health",
        "x-forwarded-prefix": "/health",
        "x-rewrite-url": "/ping",
    }
    async with client_of(GuardMiddleware(echo_app, KEYED), headers=headers) as app:
        assert (await app.get("/v1/models")).status_code == 401
        host = {"host": "localhost/health?"}
        assert (await app.get("/v1/models", headers=host)).status_code == 403


async def test_a_websocket_is_closed_and_lifespan_events_reach_the_app() -> None:
    sent: list[MutableMapping[str, Any]] = []
    reached: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["type"])

    async def receive() -> MutableMapping[str, Any]:
        return {}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    for kind in ("websocket", "lifespan"):
        await GuardMiddleware(app, OPEN)({"type": kind, "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}] and reached == ["lifespan"]


# --- OPTIONS: preflight requests of browsers


def app_with_cors() -> AsgiApp:
    """Build an app in vLLM's order: the key check encloses CORS, and no origin is allowed."""
    routes = FastAPI()

    @routes.get("/health")
    def health() -> JSONResponse:  # pyright: ignore[reportUnusedFunction]
        return JSONResponse({})

    cors = CORSMiddleware(routes, allow_origins=[], allow_methods=["*"], allow_headers=["*"])
    return GuardMiddleware(cors, KEYED)  # pyright: ignore[reportArgumentType]


async def test_a_preflight_needs_no_key_and_is_refused_as_vllm_refuses_it() -> None:
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    async with client_of(app_with_cors()) as app:
        answer = await app.options("/v1/chat/completions", headers=headers)
        plain = await app.options("/health")
        unknown = await app.options("/v1/nothing")
    assert (answer.status_code, answer.text) == (400, "Disallowed CORS origin")
    assert answer.headers["vary"].startswith("Origin, Access-Control-Request-Method")
    assert "access-control-allow-origin" not in answer.headers
    assert (plain.status_code, plain.json()) == (405, {"detail": "Method Not Allowed"})
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})
    assert plain.headers["vary"] == "Origin"


async def test_every_response_but_the_401_has_vary_behind_vllms_cors() -> None:
    async with client_of(app_with_cors()) as app:
        assert "vary" not in (await app.get("/v1/models")).headers
        assert (await app.get("/health")).headers["vary"] == "Origin"


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (MemoryError(), 503, "Service Unavailable"),
        (ValueError("a secret"), 500, "InternalServerError"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_failure_gets_an_error_in_vllms_form(
    failure: Exception, status: int, kind: str, method: str
) -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise failure

    app: Any = GuardMiddleware(failing, OPEN)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        reply = await client.request(method, "/v1/x")
    assert (reply.status_code, reply.json()["error"]["type"]) == (status, kind)
    assert "secret" not in reply.text
