"""An HTTP protocol that bounds what comes beside a body.

Uvicorn's h11 does so by itself. Its httptools keeps whatever headers it is sent until the last one
has come, which may be never, and asks nobody for a key meanwhile. The protocol is handed over by
the program that serves with it: what is here only counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

MAX_HEAD_BYTES = 2**19
"""More than the guard lets through, which words its refusal, and than one read of a socket."""
PER_PART_BYTES = 32
"""What keeping a header costs beside its text, as HTTP/2 counts it."""

P = TypeVar("P", bound=type[Any])


ON_LOST = "fakevllm.on_lost"
"""In a request's `scope["state"]`: whom to tell, with the error if there was one, that the
connection is lost while the request is its last."""


def bounded(protocol: P) -> P:
    """The same protocol for uvicorn's `http`, bounded where it is the one of httptools."""
    if not hasattr(protocol, "on_header"):
        return protocol
    return cast(P, type("BoundedHttp", (BoundedHead, protocol), {}))


if TYPE_CHECKING:

    class _HttpTools:
        """What of uvicorn's protocol is listened to."""

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
    """Stands before uvicorn's protocol. What is too long is answered like what is no HTTP: 400, and
    closed."""

    _head_bytes = 0
    """Of one request: its address, headers and trailers."""
    _unseen_bytes = 0
    """Received since the parser last told of anything: one header that does not end."""

    def data_received(self, data: bytes) -> None:
        self._unseen_bytes += len(data)
        super().data_received(data)
        if self._unseen_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("Invalid HTTP request received.")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        tell = self.scope["state"].get(ON_LOST) if self.scope else None
        if tell is not None:
            tell(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._take(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._take(name + value)
        super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._unseen_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unseen_bytes = 0
        super().on_message_complete()

    def _take(self, part: bytes) -> None:
        self._unseen_bytes = 0
        self._head_bytes += len(part) + PER_PART_BYTES
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError("the request's head is too long")  # the parser makes it its own
