"""The header with which an app asks that nothing of its request is stored."""

from __future__ import annotations

from collections.abc import Mapping

from fakevllm_adapters.protocol.errors import bad_request

STORE_HEADER = "X-Fakevllm-Store"
"""Request header. Its only value is `none`: answer this request, and store nothing of it."""
STORE_NONE = {STORE_HEADER: "none"}
"""The header of a call of which the server stores nothing."""
NOT_STORED = "fakevllm.not_stored"
"""Key in the ASGI scope of a model call. Its value is True if nothing of the call may be stored."""
_NAME = STORE_HEADER.lower().encode()


def stores_nothing(headers: Mapping[bytes, bytes]) -> bool:
    """Return True if a request's headers ask that nothing of the request is stored. The names of
    `headers` are in lower case. Raises WireError (400) for an unknown value of the header.

    >>> stores_nothing({b"x-fakevllm-store": b"none"}), stores_nothing({})
    (True, False)
    """
    value = headers.get(_NAME)
    if value is None:
        return False
    if value.strip().lower() != b"none":
        shown = value[:40].decode("latin-1")
        raise bad_request(f"{STORE_HEADER} must be none, got {shown!r}.", STORE_HEADER)
    return True
