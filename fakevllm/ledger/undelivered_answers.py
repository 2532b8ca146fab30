"""Storage for undelivered answers: the app disconnected before it had received the whole answer. If
the app sends its request again, the app gets the stored answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import orjson
from sqlalchemy import Connection, Engine

from fakevllm.ledger import row_changes
from fakevllm.ledger.records import KeptAnswer
from fakevllm.ledger.redacted_records import RecordRedactor

_UNEXPIRED = """
    SELECT group_id, key, until, status, headers_json, body FROM kept_answers
    WHERE until > ? ORDER BY until
"""


class KeptAnswers:
    """Reader and writer of the table `kept_answers`.

    An answer is stored in one of two ways:

    * If the app disconnects before the record of its request is written to the ledger, the answer
      is written together with the record.
    * If the delivery fails after the record was written, `keep` stores the answer.
    """

    def __init__(
        self,
        read_engine: Engine,
        put: Callable[[Callable[[Connection], None]], object],
        redactor: RecordRedactor,
    ) -> None:
        """Create the reader and writer. `put` is a function that queues a change for the thread
        that writes the ledger."""
        self._read_engine = read_engine
        self._put = put
        self._redactor = redactor

    def keep(self, answer: KeptAnswer) -> None:
        """Store an answer that the app has not received completely, because the app
        disconnected. An answer with redacted text is not stored."""

        def change(db: Connection) -> None:
            if self._redactor.may_keep(db, answer):
                row_changes.keep_answer(db, answer=answer)

        self._put(change)

    def delivered(self, group_id: str) -> None:
        """Record that a retry of the request has received the whole answer: delete the stored
        answer, and count the retry."""
        self._put(partial(row_changes.mark_resent, group_id=group_id))

    def unexpired(self, now: float) -> list[KeptAnswer]:
        """Return the stored answers that expire after `now`, ordered by their time of expiry. `now`
        is in Unix seconds. This method blocks the thread."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_UNEXPIRED, (now,)).all()
        return [
            KeptAnswer(
                group_id=row[0],
                key=row[1],
                until=row[2],
                status=row[3],
                headers=[(name, value) for name, value in orjson.loads(row[4])],
                body=row[5],
            )
            for row in rows
        ]
