"""Who may talk to a local server: decided before any route runs.

A browser page on another site can make its visitor's browser POST to 127.0.0.1, and can point its
own name at
127.0.0.1 (DNS rebinding). Checking `Host` and `Origin` stops both. Keys guard every path but the
open ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from fakevllm_adapters.asgi import AsgiApp, Receive, Scope, Send, header_map, key_of, send_error
from fakevllm_adapters.errors import WireError, error_body, unauthorized
from fakevllm_adapters.keys import KeyRing

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules; `refusal` applies them to one request."""

    keys: KeyRing = field(default_factory=KeyRing)
    hosts: Collection[str] = LOOPBACK
    """Names a request's `Host` may carry, without port."""
    open_paths: Collection[str] = frozenset()
    """Paths that need no key."""
    own_keys: Callable[[str | None, str], bool] = lambda _key, _path: False
    """(key, path): further keys, good for some paths only, such as those of claimed episodes."""

    def refusal(
        self, method: str, path: str, host: str, origin: str | None, key: str | None
    ) -> WireError | None:
        if _hostname_of(f"//{host}") not in self.hosts:
            return _forbidden(f"Host {host!r} is not served here: add it to the allowed hosts.")
        if method not in ("GET", "HEAD") and origin is not None and not self._is_own(origin):
            return _forbidden(f"Requests from the origin {origin!r} are not accepted.")
        if path in self.open_paths or self.keys.accepts(key) or self.own_keys(key, path):
            return None
        return unauthorized()

    def _is_own(self, origin: str) -> bool:
        return _hostname_of(origin) in self.hosts


class GuardMiddleware:
    """The ASGI shell around a Guard."""

    def __init__(self, app: AsgiApp, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = {name: value.decode("latin-1") for name, value in header_map(scope).items()}
        refusal = self._guard.refusal(
            scope["method"],
            scope["path"],
            headers.get(b"host", ""),
            headers.get(b"origin"),
            key_of(header_map(scope)),
        )
        if refusal is not None:
            return await send_error(send, refusal)
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


def _hostname_of(url: str) -> str:
    """ "" for what is no URL: nobody is called that."""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _forbidden(message: str) -> WireError:
    return WireError(403, error_body(message, "PermissionDeniedError", 403))
