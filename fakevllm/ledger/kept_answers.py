"""Answers that wait for their request to be sent again, beside the groups they are of."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import orjson
from sqlalchemy import Connection, Engine

from fakevllm.ledger import statements
from fakevllm.ledger.records import KeptAnswer

_KEPT = """
    SELECT group_id, key, until, status, headers_json, body FROM kept_answers
    WHERE until > ? ORDER BY until
"""


class KeptAnswers:
    def __init__(
        self, reading: Engine, put: Callable[[Callable[[Connection], None]], None]
    ) -> None:
        """`put`: the ledger's writer. What comes with a group is in its record."""
        self._reading = reading
        self._put = put

    def keep(self, kept: KeptAnswer) -> None:
        """Of a group whose app has lost its connection."""
        self._put(partial(statements.keep, kept=kept))

    def told(self, group_id: str) -> None:
        """The request was sent again, and its app has the whole answer now."""
        self._put(partial(statements.resent, group_id=group_id))

    def until(self, now: float) -> list[KeptAnswer]:
        """Those of use after `now`, in unix seconds; oldest first. Blocks."""
        with self._reading.connect() as db:
            rows = db.exec_driver_sql(_KEPT, (now,)).all()
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
