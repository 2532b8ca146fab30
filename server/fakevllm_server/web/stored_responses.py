"""The responses that clients of the server may retrieve, in memory. Pure."""

from __future__ import annotations

from collections import OrderedDict

MAX_BYTES = 64 * 2**20
"""Maximum size of all stored responses. When it is exceeded, the oldest responses are removed."""
MAX_RESPONSES = 10_000


class StoredResponses:
    """The latest responses of the Responses format, by key and id.

    The server keeps responses until it stops. The proxy, whose apps may retrieve a response after
    days, keeps responses in its ledger.

    >>> stored = StoredResponses()
    >>> stored.store("key", "resp_1", b"{}")
    >>> stored.has("key", "resp_1"), stored.has("other", "resp_1")
    (True, False)
    """

    def __init__(self, max_bytes: int = MAX_BYTES, max_responses: int = MAX_RESPONSES) -> None:
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._num_bytes = 0
        self._responses: OrderedDict[tuple[str, str], bytes | None] = OrderedDict()

    def store(self, key: str, response_id: str, body: bytes | None) -> None:
        """Store a response.

        `key`: fingerprint of the API key that made the response, or "". `body`: the response object
        in JSON; None if only the engine has the response.
        """
        self.delete(key, response_id)
        self._responses[key, response_id] = body
        self._num_bytes += len(body or b"")
        while self._num_bytes > self._max_bytes or len(self._responses) > self._max_responses:
            _, oldest = self._responses.popitem(last=False)
            self._num_bytes -= len(oldest or b"")

    def has(self, key: str, response_id: str) -> bool:
        """Return whether the key has made a response with this id."""
        return (key, response_id) in self._responses

    def body(self, key: str, response_id: str) -> bytes | None:
        """Return the body of a stored response; None if only the engine has the response."""
        return self._responses[key, response_id]

    def delete(self, key: str, response_id: str) -> bool:
        """Delete a response, and return whether it was stored."""
        if not self.has(key, response_id):
            return False
        self._num_bytes -= len(self._responses.pop((key, response_id)) or b"")
        return True
