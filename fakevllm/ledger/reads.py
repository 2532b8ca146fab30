"""What is read from the ledger, in SQL."""

from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import orjson
from sqlalchemy import Connection, Engine, Row, select

from fakevllm.ledger import changes
from fakevllm.ledger.records import KeptAnswer
from fakevllm.ledger.tables import CALLS
from fakevllm_adapters.protocol.swarm import CapturedCall

CURVE = """
    WITH rewarded AS (
        SELECT g.group_id, COALESCE(g.trained_step, g.step) AS at, s.reward, s.served,
               g.served_by IS 'random' AS is_random,
               NOT (g.served_by IS 'greedy' AND s."index" = 0) AS is_sample
        FROM groups AS g JOIN siblings AS s USING (group_id)
        WHERE COALESCE(g.trained_step, g.step) IS NOT NULL AND s.reward IS NOT NULL
        AND COALESCE(g.run_id, '') = ?
    ), scored AS (
        SELECT at, SUM(is_sample) AS num, SUM(CASE WHEN is_sample THEN reward END) AS total,
               MIN(reward) = MAX(reward) AS is_flat,
               AVG(CASE WHEN served AND NOT is_random THEN reward END) AS returned,
               AVG(CASE WHEN served AND is_random THEN reward END) AS random
        FROM rewarded GROUP BY group_id
    )
    SELECT at, COUNT(*), SUM(total) / SUM(num), AVG(returned), SUM(is_flat), AVG(random)
    FROM scored GROUP BY at ORDER BY at
"""
RUNS = """
    SELECT COALESCE(run_id, '') FROM groups WHERE COALESCE(trained_step, step) IS NOT NULL
    GROUP BY 1 ORDER BY MAX(received_at) DESC
"""
UNTRAINED = """
    SELECT CASE instr(reason, ':') WHEN 0 THEN reason
           ELSE substr(reason, 1, instr(reason, ':') - 1) END AS word, COUNT(*)
    FROM groups WHERE reason IS NOT NULL GROUP BY word ORDER BY word
"""
FAILURES = """
    SELECT failure, COUNT(*) FROM siblings WHERE failure IS NOT NULL
    GROUP BY failure ORDER BY failure
"""
SCORED = """
    SELECT g.group_id, g.task_id, g.question, g.served_index, g.parent_id, s.reward + CASE
           WHEN s.served THEN COALESCE((SELECT SUM(f.amount) FROM feedback AS f
                                        WHERE f.group_id = g.group_id AND f.state = 'joined'), 0)
           ELSE 0 END
    FROM groups AS g JOIN siblings AS s USING (group_id)
    WHERE g.state = 'scored' ORDER BY g.received_at, g.group_id, s."index"
"""
ANSWERED = """
    SELECT g.request_json, s.message_json
    FROM groups AS g JOIN siblings AS s USING (group_id)
    WHERE g.response_id = ? AND g.app_key IS ? AND s.served AND s.message_json IS NOT NULL
    ORDER BY g.received_at DESC LIMIT 1
"""
LATEST = """
    SELECT group_id FROM groups AS g
    WHERE 2 <= (SELECT COUNT(*) FROM siblings AS s
                WHERE s.group_id = g.group_id AND s.message_json IS NOT NULL)
    ORDER BY received_at DESC LIMIT 1
"""


# The calls of a group, as the engine saw them.

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


# Answers that wait for their request to be sent again, beside the groups they are of.

_KEPT = """
    SELECT group_id, key, until, status, headers_json, body FROM kept_answers
    WHERE until > ? ORDER BY until
"""


class KeptAnswers:
    def __init__(
        self, reading: Engine, put: Callable[[Callable[[Connection], None]], object]
    ) -> None:
        """`put`: the ledger's writer. What comes with a group is in its record."""
        self._reading = reading
        self._put = put

    def keep(self, kept: KeptAnswer) -> None:
        """Of a group whose app has lost its connection."""
        self._put(partial(changes.keep, kept=kept))

    def told(self, group_id: str) -> None:
        """The request was sent again, and its app has the whole answer now."""
        self._put(partial(changes.resent, group_id=group_id))

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
