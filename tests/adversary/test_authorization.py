"""Every route of the server and of the proxy, with every kind of API key, sent in every way.

The cases are derived from the route tables of the two apps. A route that `SERVER_ROUTES` or
`PROXY_ROUTES` does not list fails a test: add it there, with the clients who may use it. The apps
run in this process without an engine, so a request that passes the access checks may still be
refused with any other error than 401 and 403.
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from starlette.routing import Route

from fakevllm.config.model import Config
from fakevllm.web import app as proxy_app
from fakevllm.web.proxy_components import open_proxy
from fakevllm_adapters.protocol.keys import (
    KeyRing,
    Role,
    fingerprint,
    named_key,
    new_episode_key,
)
from fakevllm_adapters.protocol.swarm import Task
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.web.app import create_app as create_server
from fakevllm_server.web.server_state import ServerState


class Access(StrEnum):
    """The clients who may use a route."""

    OPEN = "everybody"
    MODEL = "every valid key, and the key of an episode (server) or of a task (proxy)"
    CLIENT = "every valid key"
    ADMIN = "the key of an admin"


OPEN, MODEL, CLIENT, ADMIN = Access
MODEL_ROUTES = dict.fromkeys(
    (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/cancel",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/models/{first}/{rest:path}",
    ),
    MODEL,
)
ENGINE_ROUTES = dict.fromkeys(("/version", "/load", "/metrics", "/tokenize", "/detokenize"), CLIENT)
EPISODE_PATH = "/e/{episode_uuid}"
SERVER_ROUTES: dict[str, Access] = {
    "/health": OPEN,
    "/ping": OPEN,
    **MODEL_ROUTES,
    **ENGINE_ROUTES,
    **{EPISODE_PATH + path: MODEL for path in (*MODEL_ROUTES, *ENGINE_ROUTES, "/ping")},
    "/sync_train_config": ADMIN,
    "/sync_train_code": ADMIN,
    "/start_engine": ADMIN,
    "/stop_engine": ADMIN,
    "/pause_claims": ADMIN,
    "/resume_claims": ADMIN,
    "/load_policy": ADMIN,
    "/unload_policy": ADMIN,
    "/releases": ADMIN,
    "/release": ADMIN,
    "/rollback": ADMIN,
    "/training_limit": ADMIN,
    "/forget_groups": ADMIN,
    "/add_logged_group": ADMIN,
    "/replay_latest_llm_call": ADMIN,
    "/get_episode_tokens": ADMIN,
    **dict.fromkeys(
        (
            *("/get_engine_status", "/get_train_config", "/get_run_log", "/get_runs"),
            "/get_weights",
            *("/claim_episode", "/renew_episode", "/can_continue_episode"),
            *("/end_episode", "/abort_episode", "/end_group", "/abort_group", "/add_sample"),
            "/add_demonstration",
            *("/get_episode_buffer", "/get_current_batch_rollout_pool_information"),
            *("/agree_sync_weight", "/push_verbose_log", "/get_verbose_logs"),
            *("/get_server_experiment_dir", "/register_episode", "/is_episode_claimed"),
            *("/update_engine_status", "/update_current_batch_rollout_pool_information"),
            "/update_current_batch_rollout_pool_information_and_fetch_instruction",
            *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"),
        ),
        CLIENT,
    ),
}
PROXY_ROUTES: dict[str, Access] = {
    "/health": OPEN,
    "/ping": OPEN,
    **MODEL_ROUTES,
    **ENGINE_ROUTES,
    "/v1/feedback": MODEL,
    "/fakevllm/tasks": CLIENT,
    "/fakevllm/eval": CLIENT,
    "/fakevllm/eval/check": CLIENT,
    "/fakevllm/eval/end": CLIENT,
    "/fakevllm/groups/{group_id}": CLIENT,
    "/fakevllm/engine": CLIENT,
    "/fakevllm/stats": CLIENT,
    "/fakevllm/pause": ADMIN,
    "/fakevllm/resume": ADMIN,
    "/fakevllm/hooks/reload": ADMIN,
    "/fakevllm/forget": ADMIN,
    "/fakevllm/configuration": ADMIN,
}

PARAMETER = re.compile(r"\{[^}]+\}")
PASS = "passes"
"""The result of a request that the access checks let through: any status but 401 and 403."""
INVALID: dict[Access, int | str] = {OPEN: PASS, MODEL: 401, CLIENT: 401, ADMIN: 401}
ONLY_MODEL = INVALID | {MODEL: PASS}
RESULTS: dict[str, dict[Access, int | str]] = {
    "no key": INVALID,
    "an empty key": INVALID,
    "an unknown key": INVALID,
    "the hash of a key": INVALID,
    "the line of a key in the key file": INVALID,
    "the beginning of a key": INVALID,
    "a revoked key of an admin": INVALID,
    "a revoked key of a client": INVALID,
    "a client's key": {OPEN: PASS, MODEL: PASS, CLIENT: PASS, ADMIN: 403},
    "an admin's key": {OPEN: PASS, MODEL: PASS, CLIENT: PASS, ADMIN: PASS},
    # the server
    "the key of a claimed episode": ONLY_MODEL,
    "the key of an episode that has ended": INVALID | {MODEL: 404},
    "the key of an episode that a revoked key has claimed": INVALID,
    "a made-up key of an episode": INVALID | {MODEL: 404},
    # the proxy
    "the key of a task": ONLY_MODEL,
    "the key of a task of a revoked key": INVALID,
    "the key of a task that is not registered": INVALID,
    "a task key without a signature": INVALID,
    "a task key with the signature of another task": INVALID,
}
"""The expected result of a request, for each kind of route and each kind of key."""

ADMIN_KEY, CLIENT_KEY = "sk-admin", "sk-client"
REVOKED_ADMIN, REVOKED_CLIENT = "sk-old-admin", "sk-old-client"
NAMES = {ADMIN_KEY: "root", CLIENT_KEY: "ann", REVOKED_ADMIN: "max", REVOKED_CLIENT: "eve"}
ENTRIES = [
    named_key(ADMIN_KEY, "root", "2026-01-01"),
    named_key(CLIENT_KEY, "ann", "2026-01-01", Role.CLIENT),
    replace(named_key(REVOKED_ADMIN, "max", "2026-01-01"), revoked="2026-01-02"),
    replace(named_key(REVOKED_CLIENT, "eve", "2026-01-01", Role.CLIENT), revoked="2026-01-02"),
]
KEYS: dict[str, str | None] = {
    "no key": None,
    "an empty key": "",
    "an unknown key": "sk-unknown",
    "the hash of a key": ENTRIES[0].digest.hex(),
    "the line of a key in the key file": ENTRIES[0].line,
    "the beginning of a key": ADMIN_KEY[:-1],
    "a revoked key of an admin": REVOKED_ADMIN,
    "a revoked key of a client": REVOKED_CLIENT,
    "a client's key": CLIENT_KEY,
    "an admin's key": ADMIN_KEY,
}
"""The keys that server and proxy have in common. The admin's key is the last one, because it stops
the engine, which ends all claims."""


@dataclass(frozen=True, slots=True)
class Attacked:
    """A running app with the data that the tests need."""

    http: httpx.AsyncClient
    routes: list[Route]
    rules: dict[str, Access]
    keys: dict[str, str | None]
    """One key of each kind."""
    episode_uuid: str = "none"

    def requests(self) -> Iterable[tuple[str, str, Access]]:
        """Return method, path and rule of each route. The method HEAD is left out, because the body
        of its reply does not show why the request was refused."""
        for route in self.routes:
            path = route.path.replace("{episode_uuid}", self.episode_uuid)
            path = PARAMETER.sub("x", path)
            for method in sorted(set(route.methods or ()) - {"HEAD"}):
                yield method, path, self.rules[route.path]

    async def result(self, method: str, path: str, headers: dict[str, str]) -> int | str:
        """Send a request. Return its status if an access check may have refused the request.
        Otherwise return PASS."""
        body = b"" if method in ("GET", "HEAD", "OPTIONS") else b"{}"
        reply = await self.http.request(method, path, content=body, headers=headers)
        is_late = reply.status_code == 404 and b"is not claimed, cannot accept" in reply.content
        return reply.status_code if reply.status_code in (401, 403) or is_late else PASS


def ways_to_send(key: str | None) -> dict[str, dict[str, str]]:
    """Return the headers of each way in which a client may send this key."""
    if key is None:
        return {"without": {}}
    basic = base64.b64encode(f"{NAMES.get(key, 'ann')}:{key}".encode()).decode()
    return {
        "bearer": {"Authorization": f"Bearer {key}"},
        "x-api-key": {"X-Api-Key": key},
        "basic": {"Authorization": f"Basic {basic}"},
    }


def client_of(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def routes_of(app: Any) -> list[Route]:
    """Return the routes of an app. Raises AssertionError for an entry that is not a route."""
    assert all(isinstance(route, Route) for route in app.routes), app.routes
    return list(app.routes)


def claimed_key(server: ServerState, owner: str) -> tuple[str, str]:
    """Claim an episode, and return its uuid and its key."""
    episode = server.episodes.claim("c", "train", 1e9, 0.0, owner)
    return episode.uuid, episode.key


def server_config(folder: Path, keys: KeyRing) -> ServerConfig:
    """Return the configuration of a server that has all routes."""
    return ServerConfig("fake", folder, keys=keys, keep_latest_call=True, allow_train_code=True)


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncGenerator[Attacked]:
    app = create_server(server_config(tmp_path, KeyRing(ENTRIES)))
    state: ServerState = app.state.server
    ended_uuid, ended_key = claimed_key(state, "ann")
    state.episodes.abort(ended_uuid, "c")
    uuid, key = claimed_key(state, "ann")
    keys = {
        "the key of a claimed episode": key,
        "the key of an episode that has ended": ended_key,
        "the key of an episode that a revoked key has claimed": claimed_key(state, "eve")[1],
        "a made-up key of an episode": new_episode_key(1),
        "the key of a task that is not registered": "sk-task-t",
        **KEYS,
    }
    async with client_of(app) as http:
        yield Attacked(http, routes_of(app), SERVER_ROUTES, keys, uuid)
    await state.close()


@pytest_asyncio.fixture
async def proxy(tmp_path: Path) -> AsyncGenerator[Attacked]:
    file = tmp_path / "keys"
    file.write_text("".join(f"{entry.line}\n" for entry in ENTRIES))
    sections: Any = {
        "proxy": {"run_dir": tmp_path, "key_file": file},
        "swarm": {"url": "http://127.0.0.1:9"},
        "upstream": {"hold_s": 0.0},
    }
    async with open_proxy(Config.model_validate(sections)) as parts:
        client, revoked = fingerprint(CLIENT_KEY), fingerprint(REVOKED_CLIENT)
        parts.tasks.add([Task(task_id="t"), Task(task_id="t2")], client)
        parts.tasks.add([Task(task_id="old")], revoked)
        valid, other = (parts.tasks.key(name, client) for name in ("t", "t2"))
        keys = {
            "the key of a task": valid,
            "the key of a task of a revoked key": parts.tasks.key("old", revoked),
            "the key of a task that is not registered": parts.tasks.key("none", client),
            "a task key without a signature": "sk-task-t",
            "a task key with the signature of another task": (
                f"{valid.rpartition('.')[0]}.{other.rpartition('.')[2]}"
            ),
            "the key of an episode that a revoked key has claimed": new_episode_key(1),
            **KEYS,
        }
        app = proxy_app.create_app(parts)
        async with client_of(app) as http:
            routes = routes_of(proxy_app.create_routes(parts, endpoints_of(app)))
            yield Attacked(http, routes, PROXY_ROUTES, keys)


def endpoints_of(app: Any) -> Any:
    """Return the endpoints that the proxy's fast path calls, by path."""
    while not isinstance(app, proxy_app.FastPathRouter):
        app = app._app
    return app._endpoints  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(params=["server", "proxy"])
def attacked(request: pytest.FixtureRequest) -> Attacked:
    return request.getfixturevalue(request.param)


def test_every_route_has_a_rule_and_every_rule_a_route(attacked: Attacked) -> None:
    assert {route.path for route in attacked.routes} == set(attacked.rules)


async def test_each_kind_of_key_gets_from_each_route_what_the_table_says(
    attacked: Attacked,
) -> None:
    wrong: list[str] = []
    num_checks = 0
    for kind, key in attacked.keys.items():
        for way, headers in ways_to_send(key).items():
            for method, path, access in attacked.requests():
                result = await attacked.result(method, path, headers)
                num_checks += 1
                if result != RESULTS[kind][access]:
                    wrong.append(f"{method} {path}: {kind} ({way}): {result}")
    assert wrong == [], "\n".join(wrong)
    assert num_checks > 1000


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "TRACE", "CONNECT", "BREW")
UNDEFINED = ("/", "//", "/nothing", "/v1", "/v1/", "/e/", "/e/x", "/e/x/stop_engine", "/fakevllm")


async def test_no_method_and_no_undefined_path_answers_a_request_without_a_key(
    attacked: Attacked,
) -> None:
    paths = {path: access for _, path, access in attacked.requests()}
    closed = [path for path, access in paths.items() if access is not OPEN]
    for path in (*closed, *UNDEFINED):
        for method in METHODS:
            assert await attacked.result(method, path, {}) == 401, (method, path)


SPELLINGS: list[Callable[[str], str]] = [
    lambda path: path + "/",
    lambda path: "/" + path,
    lambda path: path + "?x=/health",
    lambda path: path + "%00",
    lambda path: path + "%2F..%2Fhealth",
    lambda path: path.upper(),
    lambda path: path[:2] + f"%{ord(path[2]):02X}" + path[3:],
    lambda path: "/health/.." + path,
    lambda path: "/v1/..;" + path,
    lambda path: "/e/x" + path,
    lambda path: "/%2e" + path,
    lambda path: path.replace("_", "%EF%BC%BF"),
]
"""Other spellings of a path, some of which name the same route."""


async def test_no_spelling_of_an_admins_route_lets_a_client_in(attacked: Attacked) -> None:
    routes = [one for one in attacked.requests() if one[2] is ADMIN]
    headers = {"Authorization": f"Bearer {CLIENT_KEY}"}
    for method, path, _ in routes:
        for spell in SPELLINGS:
            reply = await attacked.http.request(method, spell(path), headers=headers)
            assert reply.status_code in (307, 403, 404), (method, spell(path))
    assert routes


async def test_a_refused_request_is_refused_before_its_body_is_read(attacked: Attacked) -> None:
    async def endless() -> AsyncGenerator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    for method, path, access in attacked.requests():
        if access is not OPEN and method == "POST":
            reply = await attacked.http.request(method, path, content=endless())
            assert reply.status_code == 401


async def test_without_keys_every_route_is_open_to_every_key(tmp_path: Path) -> None:
    app = create_server(server_config(tmp_path, KeyRing()))
    async with client_of(app) as http:
        attacked = Attacked(http, routes_of(app), SERVER_ROUTES, KEYS)
        for key in KEYS.values():
            for headers in ways_to_send(key).values():
                for method, path, _ in attacked.requests():
                    assert await attacked.result(method, path, headers) == PASS, (method, path)
    await app.state.server.close()
