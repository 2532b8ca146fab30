"""The responses that clients of the server may retrieve. They are kept in memory. This module does
no I/O."""

from __future__ import annotations

from collections import OrderedDict

MAX_BYTES = 64 * 2**20
"""Maximum size of all stored responses. When this size is exceeded, the oldest responses are
removed."""
MAX_RESPONSES = 10_000
MAX_ID_CHARS = 256
"""Maximum length of an id. A response with a longer id, which its client has chosen, is not
stored."""


class StoredResponses:
    """The latest responses in OpenAI's Responses format. A response is found by the API key that
    made it and by its id.

    The responses are lost when the server stops. An app may retrieve a response days after the
    response was made. Therefore the proxy keeps the responses of its apps in its ledger, a SQLite
    file.

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
        """Store a response, so that clients can retrieve it.

        `key` is the fingerprint of the API key that made the response. It is "" if the request had
        no API key. `body` is the response object in JSON, or None if only the engine has the
        response.
        """
        if len(response_id) > MAX_ID_CHARS:
            return
        self.delete(key, response_id)
        self._responses[key, response_id] = body
        self._num_bytes += _size(response_id, body)
        while self._num_bytes > self._max_bytes or len(self._responses) > self._max_responses:
            (_, oldest_id), oldest = self._responses.popitem(last=False)
            self._num_bytes -= _size(oldest_id, oldest)

    def has(self, key: str, response_id: str) -> bool:
        """Return True if a response of this API key with this id is stored."""
        return (key, response_id) in self._responses

    def body(self, key: str, response_id: str) -> bytes | None:
        """Return the body of a stored response, or None if only the engine has the body."""
        return self._responses[key, response_id]

    def delete(self, key: str, response_id: str) -> bool:
        """Delete a stored response. Return False if no response of this API key had this id."""
        if not self.has(key, response_id):
            return False
        self._num_bytes -= _size(response_id, self._responses.pop((key, response_id)))
        return True


def _size(response_id: str, body: bytes | None) -> int:
    return len(response_id) + len(body or b"")
