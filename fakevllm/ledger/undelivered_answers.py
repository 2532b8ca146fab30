"""Storage for answers whose app disconnected before it had received the whole answer. An app that
sends its request again gets the stored answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import orjson
from sqlalchemy import Connection, Engine

from fakevllm.ledger import row_changes
from fakevllm.ledger.records import KeptAnswer

_UNEXPIRED = """
    SELECT group_id, key, until, status, headers_json, body FROM kept_answers
    WHERE until > ? ORDER BY until
"""


class KeptAnswers:
    """Reader and writer of the table `kept_answers`.

    There are two ways to store an answer. If the app disconnects before the group of its request is
    written to the ledger, the answer is stored together with the `GroupRecord`. If the delivery
    fails after the group was written, `keep` stores the answer.
    """

    def __init__(
        self, read_engine: Engine, put: Callable[[Callable[[Connection], None]], object]
    ) -> None:
        """Create the reader and writer. `put` is a function that queues a change for the thread
        that writes the ledger."""
        self._read_engine = read_engine
        self._put = put

    def keep(self, answer: KeptAnswer) -> None:
        """Store the answer of a group whose app has disconnected."""
        self._put(partial(row_changes.keep_answer, answer=answer))

    def delivered(self, group_id: str) -> None:
        """Delete an answer and count the retry, because the app has the whole answer now."""
        self._put(partial(row_changes.mark_resent, group_id=group_id))

    def unexpired(self, now: float) -> list[KeptAnswer]:
        """Return the answers that expire after `now` (Unix seconds), ordered by their time of
        expiry. This method blocks, because it reads the file."""
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
