"""Response headers by which an app finds out how its answer was made.

One header names the version of the weights, and is set by the server. The other header names the
group (the request with its sampled answers), and is set by the proxy. The module does no I/O.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fakevllm_adapters.http.asgi import Headers, Send

GROUP_HEADER = b"x-fakevllm-group"
"""Id of the request's group. `GET /fakevllm/groups/ID` shows how the group's answers were made."""
VERSION_HEADER = b"x-fakevllm-version"
"""Version of the weights that sampled the first token of the answer. The header is absent if the
version was not known when the headers were sent."""


class VersionedSend:
    """Wrapper of an ASGI `send` that adds a header with the weights' version to each 200 response.

    For speed, the wrapper adds no coroutine of its own: every chunk of a stream passes through it.
    """

    def __init__(self, send: Send, version: Callable[[], int | None]) -> None:
        """Create the wrapper. `version` is called when the response starts, and returns the version
        of the weights, or None to add no header."""
        self._send = send
        self._version = version

    def __call__(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        if message["type"] == "http.response.start" and message["status"] == 200:
            message["headers"] = [*message["headers"], *version_headers(self._version())]
        return self._send(message)


def version_headers(version: int | None) -> Headers:
    """Return a list with the header that names a version. Return [] if the version is None.

    >>> version_headers(3), version_headers(None)
    ([(b'x-fakevllm-version', b'3')], [])
    """
    return [] if version is None else [(VERSION_HEADER, b"%d" % version)]


def without_version(headers: Headers) -> Headers:
    """Return the headers without the header that names the version of the weights. Only the server
    may set this header."""
    return [field for field in headers if field[0] != VERSION_HEADER]


def with_group(headers: Headers, group_id: str | None) -> Headers:
    """Return the headers of an answer, with a header that names its group (the request with its
    sampled answers). If `group_id` is None, remove all headers that this module defines.

    >>> with_group([(b"x-fakevllm-version", b"3")], "g")
    [(b'x-fakevllm-version', b'3'), (b'x-fakevllm-group', b'g')]
    >>> with_group([(b"x-fakevllm-version", b"3")], None)
    []
    """
    if group_id is None:
        return [field for field in headers if field[0] not in (GROUP_HEADER, VERSION_HEADER)]
    others = [field for field in headers if field[0] != GROUP_HEADER]
    return [*others, (GROUP_HEADER, group_id.encode())]
