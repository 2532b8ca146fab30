"""Who may talk to a local server, and how much at a time: decided before any route runs.

A browser page on another site can make its visitor's browser POST to 127.0.0.1, and can point its
own name at 127.0.0.1 (DNS rebinding). Checking `Host` and `Origin` stops both.

Keys guard every path but the open ones, by the path that is routed: a URL put together from
headers can be made to read differently. What stops others is for the keys of admins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fakevllm_adapters.http.asgi import (
    AsgiApp,
    Receive,
    Scope,
    Send,
    header_map,
    send_error,
    too_large,
)
from fakevllm_adapters.http.limits import Limits, OpenCalls
from fakevllm_adapters.protocol.credentials import credentials_in
from fakevllm_adapters.protocol.errors import WireError, error_body, unauthorized
from fakevllm_adapters.protocol.keys import KeyRing

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
OPEN_PATHS = frozenset({"/health", "/ping"})
"""What a load balancer asks without a key."""
_HOST = re.compile(r"[\w.\-:\[\]]+", re.ASCII)
"""What a `Host` is made of; with a slash or a question mark it would be more than a host."""


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules; `refusal` applies them to one request."""

    keys: KeyRing = field(default_factory=KeyRing)
    hosts: Collection[str] = LOOPBACK
    """Names a request's `Host` may carry, without port."""
    hosts_setting: str = "the allowed hosts"
    """What a further name is to be added to, as the user knows it."""
    open_paths: Collection[str] = OPEN_PATHS
    """Paths that need no key."""
    admin_paths: Collection[str] = frozenset()
    """Paths that need the key of an admin."""
    own_keys: Callable[[str | None, str], bool] = lambda _key, _path: False
    """(key, path): further keys, good for some paths only, such as those of claimed episodes."""
    stranger: Callable[[str | None, str], WireError] = lambda _key, _path: unauthorized()
    """(key, path): what the bearer of a key that is not good is told."""
    limits: Limits = field(default_factory=Limits)
    open_calls: OpenCalls = field(default_factory=OpenCalls)

    def refusal(
        self,
        method: str,
        path: str,
        host: str,
        origin: str | None,
        key: str | None,
        name: str | None = None,
    ) -> WireError | None:
        """`key`, `name`: what is shown, and whose it is said to be."""
        if _HOST.fullmatch(host) is None or _hostname_of(f"//{host}") not in self.hosts:
            return _forbidden(
                f"Host {host[:200]!r} is not served here: add it to {self.hosts_setting}."
            )
        if method == "OPTIONS":
            return None  # a browser asks so without a key; no route of ours does anything for it
        if method not in ("GET", "HEAD") and origin is not None and not self._is_own(origin):
            return _forbidden(f"Requests from the origin {origin[:200]!r} are not accepted.")
        if path in self.open_paths or self.own_keys(key, path):
            return None
        if not self.keys.accepts(key, name):
            return self.stranger(key, path)
        if path in self.admin_paths and not self.keys.is_admin(key):
            return _for_admins(path, self.keys.owner_of(key))
        return None

    def is_counted(self, method: str, path: str) -> bool:
        """Whether a request is one of those that an engine works for."""
        return method == "POST" and path not in self.open_paths

    def _is_own(self, origin: str) -> bool:
        return _hostname_of(origin) in self.hosts


class GuardMiddleware:
    """The ASGI shell around a Guard."""

    def __init__(self, app: AsgiApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":  # the server's own start and stop
            return await self._app(scope, receive, send)
        guard, method, path = self._guard, scope["method"], scope["path"]
        headers = header_map(scope)
        shown = credentials_in(headers)
        key = shown.key
        refusal = guard.limits.headers_refusal(scope["headers"]) or guard.refusal(
            method, path, _text(headers, b"host") or "", _text(headers, b"origin"), *shown
        )
        if refusal is not None:
            return await send_error(send, refusal)
        receive = _bounded(receive, guard.limits.body_bytes)
        if not guard.is_counted(method, path):
            return await self._app(scope, receive, send)
        refusal = guard.open_calls.enter(key)
        if refusal is not None:
            return await send_error(send, refusal)
        try:
            await self._app(scope, receive, send)
        finally:
            guard.open_calls.leave(key)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable from this machine alone. A name other than
    `localhost` may mean anything."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _bounded(receive: Receive, limit: int) -> Receive:
    """Also for the routes that leave reading to their framework."""
    size = 0

    async def bounded() -> Any:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large(limit)
        return message

    return bounded


def _text(headers: dict[bytes, bytes], name: bytes) -> str | None:
    value = headers.get(name)
    return None if value is None else value.decode("latin-1")


@lru_cache(64)
def _hostname_of(url: str) -> str:
    """ "" for what is no URL: nobody is called that."""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _for_admins(path: str, owner: str) -> WireError:
    """In the swarm protocol's shape: it is no engine's door."""
    detail = (
        f"{path} is for admins, and the key of {owner} has the role client: ask an admin, or show "
        "a key made with `fakevllm keys add NAME --role admin`."
    )
    return WireError(403, {"detail": detail})


def _forbidden(message: str) -> WireError:
    return WireError(403, error_body(message, "PermissionDeniedError", 403))
