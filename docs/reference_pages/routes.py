"""The page that lists the HTTP routes of proxy and server, and who may call them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route

from docs.reference_pages.docstrings import text_of
from docs.reference_pages.markdown import Page, code, prose, section, table
from docs.reference_pages.running import proxy_parts, server_routes
from fakevllm.web.routes import admin
from fakevllm_adapters.formats.registry import ADAPTERS
from fakevllm_adapters.http.access_guard import OPEN_PATHS
from fakevllm_adapters.http.model_cards import MODEL_CARD_PATHS
from fakevllm_server.web.app import EPISODE_PREFIX
from fakevllm_server.web.routes import authorization

INTRODUCTION = """\
This page lists the HTTP routes of the proxy and of the server, and who may call them. \
[Configuration](../configuration.md#routes) explains the routes of the proxy, \
[the server's page](../../server/README.md) those of the server, and \
[Who may do what](../access.md) the keys and roles. The column *who* has these entries:

| entry | who may call the route |
| --- | --- |
| everyone | Every client, also without an API key. |
| every key | Every client with an API key of the key file, whatever its role. |
| admin | Every client with an API key of the role `admin`. |

Without a key file, every client may call every route."""
PROXY = """\
A route below `/v1/` also accepts the keys that `POST /fakevllm/tasks` returns, one for each \
task."""
SERVER = f"""\
A route below `/v1/` also accepts the key of a claimed episode. Each route that the engine answers \
also exists below `{EPISODE_PREFIX}{{episode_uuid}}`, the base URL of an episode."""
_ENGINE_ROUTES = {
    "/v1/messages/count_tokens": "Count the tokens of a request in the format of Anthropic.",
    "/v1/models": "List the models.",
    "/v1/responses/{response_id}": "Retrieve (GET) or delete (DELETE) a stored response. Only the "
    "API key that made the response may do this.",
    "/v1/responses/{response_id}/cancel": "Cancel a stored response. Only the API key that made "
    "the response may do this.",
    "/metrics": "Return the metrics of the engine for Prometheus.",
    "/version": "Return the version of the engine.",
    "/ping": "Reply with status 200 while the engine is running.",
    "/load": "Return the number of requests that the engine is processing.",
    "/tokenize": "Return the token ids of a text or of messages.",
    "/detokenize": "Return the text of token ids.",
    **{adapter.path: "Generate an answer." for adapter in ADAPTERS.values()},
    **dict.fromkeys(MODEL_CARD_PATHS, "Return the card of one model."),
}
"""Meaning of the routes that are relayed to the engine, which have no function of their own."""


def page() -> Page:
    """Return the page with one section for the proxy and one for the server."""
    proxy, _ = proxy_parts()
    return Page(
        "HTTP routes",
        INTRODUCTION,
        [
            section("The proxy", PROXY, _table(proxy, admin.ADMIN_PATHS)),
            section("The server", SERVER, _table(server_routes(), authorization.ADMIN_PATHS)),
        ],
    )


def _table(routes: Sequence[BaseRoute], admin_paths: Collection[str]) -> str:
    methods: dict[tuple[str, str], list[str]] = {}
    for route in routes:
        assert isinstance(route, Route | APIRoute), f"{route} is of an unknown kind"
        is_own = isinstance(route, APIRoute) or route.path in _ENGINE_ROUTES
        if is_own and not route.path.startswith(EPISODE_PREFIX):
            known = methods.setdefault((route.path, _meaning(route)), [])
            known += sorted((route.methods or set()) - {"HEAD", *known})
    rows = [
        [code(path), ", ".join(names), _who(path, admin_paths), prose(meaning)]
        for (path, meaning), names in sorted(methods.items())
    ]
    return table(["route", "method", "who", "meaning"], rows)


def _meaning(route: Route | APIRoute) -> str:
    """Return what a route does: the first paragraph of its function's docstring."""
    meaning = _ENGINE_ROUTES.get(route.path)
    if isinstance(route, APIRoute) and route.endpoint.__doc__:
        meaning = text_of(route.endpoint.__doc__.partition("\n\n")[0])
    if meaning is None:
        raise ValueError(f"the route {route.path} has no docstring: write one in its function")
    return meaning


def _who(path: str, admin_paths: Iterable[str]) -> str:
    if path in OPEN_PATHS:
        return "everyone"
    return "admin" if path in admin_paths else "every key"
