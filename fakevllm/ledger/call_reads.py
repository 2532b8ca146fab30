"""The calls of a group, as the engine saw them."""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from typing import Any

import orjson
from sqlalchemy import Engine, Row, select

from fakevllm.ledger.tables import CALLS
from fakevllm_adapters.protocol.swarm import CapturedCall

MAX_FOUND = 2
_BEGINNING = """
    SELECT group_id FROM groups WHERE substr(group_id, 1, length(?1)) = ?1
    ORDER BY group_id <> ?1, received_at DESC LIMIT ?2
"""
_LATEST = """
    SELECT g.group_id FROM groups AS g WHERE EXISTS
    (SELECT 1 FROM calls AS c WHERE c.group_id = g.group_id)
    ORDER BY EXISTS
    (SELECT 1 FROM siblings AS s WHERE s.group_id = g.group_id AND s.trained) DESC,
    g.received_at DESC LIMIT 1
"""


class CallReads:
    def __init__(self, reading: Engine) -> None:
        self._reading = reading

    def beginning(self, beginning: str) -> list[str]:
        """Groups whose ids begin so, the one of that very id first; more than one is too many."""
        with self._reading.connect() as db:
            return list(db.exec_driver_sql(_BEGINNING, (beginning, MAX_FOUND)).scalars())

    def latest(self) -> str | None:
        """The newest group that is in a loss, or else the newest of which calls are known."""
        with self._reading.connect() as db:
            return db.exec_driver_sql(_LATEST).scalar()

    def by_sibling(self, group_id: str) -> dict[int, list[CapturedCall]]:
        query = select(CALLS).where(CALLS.c.group_id == group_id)
        found: defaultdict[int, list[CapturedCall]] = defaultdict(list)
        with self._reading.connect() as db:
            for row in db.execute(query.order_by(CALLS.c.sibling, CALLS.c.seq)):
                found[row.sibling].append(call_of(row))
        return dict(found)


def call_of(row: Row[Any]) -> CapturedCall:
    return CapturedCall(
        prompt_ids=b64encode(row.prompt_ids).decode(),
        response_ids=b64encode(row.response_ids).decode(),
        logprobs=None if row.logprobs is None else b64encode(row.logprobs).decode(),
        weight_versions=orjson.loads(row.weight_versions_json),
        temperature=row.temperature,
        finish_reason=row.finish_reason,
        untrainable=row.untrainable,
        shaped=bool(row.shaped),
    )
