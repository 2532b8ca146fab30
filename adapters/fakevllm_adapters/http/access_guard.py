"""Access checks and size limits that every request must pass before any route runs.

A web page on another site can make its visitor's browser POST to 127.0.0.1. The owner of a web page
can also point a domain name at 127.0.0.1 (DNS rebinding). The checks of the headers `Host` and
`Origin` stop both attacks.

Every path requires an API key, except the paths in `open_paths`. The check looks up the same path
as the server's router, and not the path of a URL that is assembled from request headers. The reason
is that a client can forge headers. Routes that affect other clients require the key of an admin.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fakevllm_adapters.http.asgi import (
    AsgiApp,
    ClientDisconnected,
    Receive,
    Scope,
    Send,
    header_map,
    send_error,
    too_large,
)
from fakevllm_adapters.http.concurrency_limit import OpenCalls
from fakevllm_adapters.http.limits import Limits
from fakevllm_adapters.protocol.credentials import credentials_in
from fakevllm_adapters.protocol.errors import WireError, error_body, error_of_failure, unauthorized
from fakevllm_adapters.protocol.keys import KeyRing

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
OPEN_PATHS = frozenset({"/health", "/ping"})
"""Paths that load balancers request without a key."""
_HOST = re.compile(r"[\w.\-:\[\]]+", re.ASCII)
"""Pattern for a valid `Host` header. It excludes the slash and the question mark, because they
would add a path or a query to the URL."""


@dataclass(frozen=True, slots=True)
class Guard:
    """The access rules of a server. The method `refusal` applies them to a request."""

    keys: KeyRing = field(default_factory=KeyRing)
    """Keys that are valid for every path."""
    hosts: Collection[str] = LOOPBACK
    """Host names without ports that a request's `Host` may have."""
    hosts_setting: str = "the allowed hosts"
    """Name of the setting with which the user adds a host. Error messages quote the name."""
    accepts_origin: Callable[[str, str], bool] = lambda _origin, _path: False
    """Function of (origin, path). It returns True if web pages of this origin may send requests to
    the path. It is called only for origins that are not in `hosts`."""
    on_refused_origin: Callable[[str, str], str] = lambda _origin, _path: ""
    """Function of (origin, path) that is called for each request refused because of its origin. The
    function returns a remedy for the error message, or "" if there is no remedy."""
    open_paths: Collection[str] = OPEN_PATHS
    """Paths that need no key."""
    admin_paths: Collection[str] = frozenset()
    """Paths that need the key of an admin."""
    accepts_extra_key: Callable[[str | None, str], bool] = lambda _key, _path: False
    """Function of (key, path) that returns True if the path accepts a key that is not in `keys`,
    such as the key of a claimed episode."""
    invalid_key_error: Callable[[str | None, str], WireError] = lambda _key, _path: unauthorized()
    """Function of (key, path) that builds the error for a missing or invalid key."""
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
        """Return the error with which to refuse a request, or None if the request may proceed.

        `host` and `origin` are headers of the request. `key` is the request's API key. `name` is
        the user name that the client sent together with the key, or None.
        """
        if _HOST.fullmatch(host) is None or _hostname_of(f"//{host}") not in self.hosts:
            return _forbidden(
                f"Host {host[:200]!r} is not served here: add it to {self.hosts_setting}."
            )
        if method == "OPTIONS":
            return None  # browsers send preflights without a key, and no route acts on OPTIONS
        if method not in ("GET", "HEAD") and not self._may_write(origin, path):
            return self._refuse_origin(origin or "", path)
        if path in self.open_paths or self.accepts_extra_key(key, path):
            return None
        if not self.keys.accepts(key, name):
            return self.invalid_key_error(key, path)
        if path in self.admin_paths and not self.keys.is_admin(key):
            return _for_admins(path, self.keys.owner_of(key))
        return None

    def is_counted(self, method: str, path: str) -> bool:
        """Return True if a request counts towards the limit on open calls.

        The result is True only for POST requests to paths that require a key. These requests cause
        work for an engine.
        """
        return method == "POST" and path not in self.open_paths

    def _may_write(self, origin: str | None, path: str) -> bool:
        if origin is None or _hostname_of(origin) in self.hosts:
            return True
        return self.accepts_origin(origin, path)

    def _refuse_origin(self, origin: str, path: str) -> WireError:
        remedy = self.on_refused_origin(origin, path)
        end = f": {remedy}." if remedy else "."
        return _forbidden(f"Requests from the origin {origin[:200]!r} are not accepted{end}")


class GuardMiddleware:
    """ASGI middleware that checks every request with a Guard (the access rules of the server)."""

    def __init__(self, app: AsgiApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":  # lifespan: the start and stop of the server
            return await self._app(scope, receive, send)
        guard, method, path = self._guard, scope["method"], scope["path"]
        headers = header_map(scope)
        credentials = credentials_in(headers)
        key = credentials.key
        refusal = guard.limits.headers_refusal(scope["headers"]) or guard.refusal(
            method,
            path,
            host=_text(headers, b"host") or "",
            origin=_text(headers, b"origin"),
            key=key,
            name=credentials.name,
        )
        if refusal is not None:
            return await send_error(send, refusal)
        receive = _bounded(receive, guard.limits.body_bytes)
        if not guard.is_counted(method, path):
            return await self._call_app(scope, receive, send)
        refusal = guard.open_calls.enter(key)
        if refusal is not None:
            return await send_error(send, refusal)
        try:
            await self._call_app(scope, receive, send)
        finally:
            guard.open_calls.leave(key)

    async def _call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app. If the app raises an exception, send an error response in vLLM's form. Then
        raise the exception again, so that the server logs it."""
        try:
            await self._app(scope, receive, send)
        except ClientDisconnected:
            raise
        except Exception as failure:  # isolates: other requests go on
            with contextlib.suppress(RuntimeError):  # a response has already begun
                await send_error(send, error_of_failure(failure))
            raise


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server that listens on this host address.

    For a host name other than `localhost`, the result is False, because the name may resolve to any
    address.
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _bounded(receive: Receive, limit: int) -> Receive:
    """Return an ASGI `receive` that limits the size of the body. It raises WireError (413) if the
    body has more than `limit` bytes.

    The web framework also reads bodies through the returned function, so the limit applies to every
    route.
    """
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
    """Return the lower-case host name of a URL, or "" if the text is not a URL.

    The result "" is safe to compare with allowed hosts, because no host has the name "".
    """
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _for_admins(path: str, owner: str) -> WireError:
    """Return the 403 for a client's key on a path that requires an admin's key.

    The error has the form of the swarm protocol (the protocol of this project's server). vLLM has
    no such paths and therefore no form for this error.
    """
    detail = (
        f"{path} is for admins, and the key of {owner} has the role client: ask an admin, or show "
        "a key made with `fakevllm keys add NAME --role admin`."
    )
    return WireError(403, {"detail": detail})


def _forbidden(message: str) -> WireError:
    return WireError(403, error_body(message, "PermissionDeniedError", 403))
