"""What the guard reads from the ledger (the proxy's database), and the memory that it stores there.
The guard notices when training goes wrong. The methods that read block the thread, so do not call
them on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import orjson
from sqlalchemy import Connection, Engine

from fakevllm.ledger.records import EVAL_KIND
from fakevllm.ledger.writer import WriteReceipt

MAX_EVAL_GROUPS = 2000
"""Number of the latest evaluated rows from which the means of versions are computed."""
_STATE_KEY = "guard"
_READ_STATE = "SELECT value FROM meta WHERE key = ?"
_PUT_STATE = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"
_ANSWERS = """
    SELECT g.group_id, g.question, s.text, s.reward, s.tool_calls_json, s.failure,
           s.annotations_json
    FROM json_each(?1) AS chosen
    CROSS JOIN group_rows AS g ON g.group_id = chosen.value
    JOIN sibling_rows AS s ON s.group_id = g.group_id
    ORDER BY chosen.key, s."index"
"""
_HELD_OUT = f"""
    WITH chosen AS MATERIALIZED (
        SELECT group_id FROM group_rows INDEXED BY ix_groups_place WHERE kind = '{EVAL_KIND}'
        ORDER BY received_at DESC, group_id DESC LIMIT {MAX_EVAL_GROUPS})
    SELECT g.eval_version, g.hook_hash, AVG(s.reward)
    FROM chosen CROSS JOIN group_rows AS g ON g.group_id = chosen.group_id
    JOIN sibling_rows AS s ON s.group_id = g.group_id AND s.reward IS NOT NULL AND s."index" > 0
    WHERE g.run_id = ? AND g.eval_version IS NOT NULL
    GROUP BY g.received_at, g.group_id ORDER BY g.received_at DESC
"""
"""The rows of an evaluation, newest first, without their greedy samples, which have the index 0."""


@dataclass(frozen=True, slots=True)
class TrainedAnswer:
    """An answer of a group, with the columns that the guard reads."""

    group_id: str
    question: str
    text: str | None
    reward: float | None
    tool_calls_json: str | None
    failure: str | None
    annotations_json: str | None


@dataclass(frozen=True, slots=True)
class HeldOutRow:
    """A held-out row that one version has answered."""

    version: int
    hook_hash: str | None
    mean: float
    """Mean reward of the samples at temperature 1."""


class GuardRows:
    """Reader of answers and of evaluated rows, and reader and writer of the guard's memory."""

    def __init__(
        self,
        read_engine: Engine,
        put: Callable[[Callable[[Connection], None]], WriteReceipt],
    ) -> None:
        """Create the object. `put` queues a change for the thread that writes the ledger."""
        self._read_engine = read_engine
        self._put = put

    def answers(self, group_ids: Sequence[str]) -> list[TrainedAnswer]:
        """Return the answers of groups, in the order of `group_ids`. Groups that the ledger does
        not have are left out."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_ANSWERS, (orjson.dumps(list(group_ids)).decode(),))
            return [TrainedAnswer(*row) for row in rows]

    def held_out(self, run_id: str) -> list[HeldOutRow]:
        """Return the latest held-out rows that versions of this run have answered, newest first."""
        with self._read_engine.connect() as db:
            return [HeldOutRow(*row) for row in db.exec_driver_sql(_HELD_OUT, (run_id,))]

    def state(self) -> str | None:
        """Return the guard's stored memory as JSON. Return None if there is none."""
        with self._read_engine.connect() as db:
            return db.exec_driver_sql(_READ_STATE, (_STATE_KEY,)).scalar()

    def put_state(self, text: str) -> WriteReceipt:
        """Queue the guard's memory as a write to the ledger. It replaces the stored one."""
        return self._put(partial(_write_state, text=text))


def _write_state(db: Connection, text: str) -> None:
    db.exec_driver_sql(_PUT_STATE, (_STATE_KEY, text))
