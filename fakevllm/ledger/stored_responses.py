"""Store responses of OpenAI's Responses API, so that apps can retrieve, delete and cancel these
responses later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from sqlalchemy import Connection, Engine

from fakevllm.ledger import row_changes
from fakevllm.ledger.records import StoredResponse
from fakevllm.ledger.redacted_records import RecordRedactor
from fakevllm.ledger.writer import WriteReceipt

_FIND = """
    SELECT group_id, created_at, body FROM responses
    WHERE response_id = ? AND owner = ? AND deleted_at IS NULL
"""


class StoredResponses:
    """Reader and writer of the ledger's table `responses`, which stores responses of the Responses
    API."""

    def __init__(
        self,
        read_engine: Engine,
        put: Callable[[Callable[[Connection], None]], WriteReceipt],
        redactor: RecordRedactor,
    ) -> None:
        """Create the reader and writer of the table `responses`. `put` is a function that queues a
        change for the thread that writes the ledger (the proxy's database)."""
        self._read_engine = read_engine
        self._put = put
        self._redactor = redactor

    def store(self, response: StoredResponse) -> None:
        """Store a response in the ledger, the proxy's database. An earlier response with the same
        id and the same API key is replaced."""

        def change(db: Connection) -> None:
            row_changes.store_response(db, response=self._redactor.response(response))

        self._put(change)

    def delete(self, response: StoredResponse, at: float) -> WriteReceipt:
        """Delete a response. After that, neither a GET request nor `previous_response_id` finds it.

        `at` is the Unix time of the deletion in seconds. A later response may have the same id.
        """
        hidden = replace(response, response_id=self._redactor.id(response.response_id))
        return self._put(partial(row_changes.delete_response, response=hidden, at=at))

    def find(self, response_id: str, app_key: str | None) -> StoredResponse | None:
        """Return the response with this id that was made with this API key. Return None if there is
        no such response, or if the response was deleted. This method blocks the thread.

        `app_key` is the fingerprint of the app's API key.
        """
        with self._read_engine.connect() as db:
            row = db.exec_driver_sql(
                _FIND, (self._redactor.id(response_id), app_key or "")
            ).one_or_none()
        return None if row is None else StoredResponse(response_id, app_key, *row)
