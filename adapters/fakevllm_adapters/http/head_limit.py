"""A limit on the size of request heads for uvicorn's httptools protocol.

Uvicorn's h11 protocol has such a limit. Its httptools protocol stores all headers until the last
header arrives. A client without an API key could therefore send headers without end: the key is
checked only when the head is complete. The program that serves passes
its protocol class to `limit_head`; this module only counts bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

MAX_HEAD_BYTES = 2**19
"""Maximum size of a request head. It exceeds the guard's limit, so that the guard can send its
worded refusal first. It also exceeds one read of a socket."""
PER_PART_BYTES = 32
"""Overhead added to the size of each header, the same as in HTTP/2."""

P = TypeVar("P", bound=type[Any])

ON_CONNECTION_LOST = "fakevllm.on_lost"
"""Key of `scope["state"]` for a callback. It is called when the connection is lost while the
request is the connection's last one. Its argument is the error, or None."""


def limit_head(protocol: P) -> P:
    """Return a subclass of uvicorn's httptools protocol that limits the size of request heads.

    Any other protocol class is returned unchanged.
    """
    if not hasattr(protocol, "on_header"):
        return protocol
    return cast(P, type("BoundedHttp", (BoundedHead, protocol), {}))


if TYPE_CHECKING:

    class _HttpTools:
        """The methods of uvicorn's httptools protocol that are overridden."""

        transport: Any
        scope: Any

        def connection_lost(self, exc: Exception | None) -> None: ...
        def data_received(self, data: bytes) -> None: ...
        def send_400_response(self, msg: str) -> None: ...
        def on_message_begin(self) -> None: ...
        def on_url(self, url: bytes) -> None: ...
        def on_header(self, name: bytes, value: bytes) -> None: ...
        def on_body(self, body: bytes) -> None: ...
        def on_message_complete(self) -> None: ...
else:
    _HttpTools = object


class BoundedHead(_HttpTools):
    """A mixin that precedes uvicorn's protocol class in the method resolution order.

    It answers a head that is too long in the same way as malformed HTTP: with 400, then it closes
    the connection.
    """

    _head_bytes = 0
    """Size of the current request's URL, headers and trailers."""
    _unseen_bytes = 0
    """Bytes received since the last callback of the parser, such as those of an endless header."""

    def data_received(self, data: bytes) -> None:
        self._unseen_bytes += len(data)
        super().data_received(data)
        if self._unseen_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Invalid HTTP request received.")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        callback = self.scope["state"].get(ON_CONNECTION_LOST) if self.scope else None
        if callback is not None:
            callback(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name + value)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unseen_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unseen_bytes = 0
        super().on_message_complete()

    def _count(self, part: bytes) -> None:
        self._unseen_bytes = 0
        self._head_bytes += len(part) + PER_PART_BYTES
        if self._head_bytes > MAX_HEAD_BYTES:
            # the parser turns this exception into one of its own
            raise ValueError("the request's head is too long")
