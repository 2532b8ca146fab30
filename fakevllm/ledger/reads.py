"""SQL queries for reading the ledger, and the class CallReads, which reads the recorded model
calls.

The methods of the class `Ledger` in store.py use the queries.
"""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import Engine, Row, select

from fakevllm.ledger.records import BROKEN_OFF, EVAL_KIND
from fakevllm.ledger.tables import CALLS
from fakevllm_adapters.protocol.swarm import CapturedCall

_CURVE = """
    SELECT step, num_groups, reward_sum / NULLIF(num_samples, 0), best_sum / NULLIF(num_best, 0),
           num_flat, random_sum / NULLIF(num_random, 0)
    FROM step_counters WHERE run_id = ?
"""
WHOLE_CURVE = f"{_CURVE} AND step >= ? ORDER BY step"
CURVE_BACKWARDS = f"{_CURVE} AND step >= ? ORDER BY step DESC"
_WEIGHTED_MEAN = """
    SUM(num_groups * {name}_sum / NULLIF(num_{count}, 0))
    / SUM(CASE WHEN num_{count} <> 0 THEN num_groups END)
"""
CURVE_POINTS = f"""
    WITH times AS (
        SELECT step, SUM(step_s) AS step_s, SUM(update_s) AS update_s
        FROM trained_versions WHERE run_id = ?1 GROUP BY step
    ), segments AS (
        SELECT *, SUM(step IN (SELECT value FROM json_each(?2))) OVER (ORDER BY step) AS segment
        FROM step_counters LEFT JOIN step_tokens USING (run_id, step) LEFT JOIN times USING (step)
        WHERE run_id = ?1
    ), points AS (
        SELECT *, (ROW_NUMBER() OVER (PARTITION BY segment ORDER BY step) - 1) / ?3 AS point
        FROM segments
    )
    SELECT MIN(step), MAX(step), SUM(num_groups),
           {_WEIGHTED_MEAN.format(name="reward", count="samples")},
           {_WEIGHTED_MEAN.format(name="best", count="best")},
           {_WEIGHTED_MEAN.format(name="random", count="random")},
           SUM(num_flat), COALESCE(SUM(num_sampled), 0), COALESCE(SUM(num_served), 0),
           COALESCE(SUM(num_trained), 0), SUM(step_s), SUM(update_s)
    FROM points GROUP BY segment, point ORDER BY segment, point
"""
"""Query for the points of a curve: each has at most ?3 consecutive steps, and the JSON list ?2 has
the steps at which a new point must begin."""
RUN_TOKENS = """
    SELECT COALESCE(SUM(num_sampled), 0), COALESCE(SUM(num_served), 0),
           COALESCE(SUM(num_trained), 0)
    FROM step_tokens WHERE run_id = ?
"""
RUN_SECONDS = "SELECT SUM(step_s), SUM(update_s) FROM trained_versions WHERE run_id = ?"
VERSION_STEPS = "SELECT version, step FROM trained_versions WHERE run_id = ?"
DIGESTS = """
    SELECT step, kind, digest FROM step_digests WHERE run_id = ? AND step >= ? ORDER BY step
"""
STEP_DIGESTS = "SELECT step, kind, digest FROM step_digests WHERE run_id = ? AND step = ?"
IS_CHANGED = "SELECT 1 FROM run_digests WHERE run_id = ? GROUP BY kind HAVING COUNT(*) > 1"
NUM_STEPS = "SELECT num_steps FROM run_counters WHERE run_id = ?"
NUM_STEPS_BEFORE = "SELECT COUNT(*) FROM step_counters WHERE run_id = ? AND step < ?"
RUNS = "SELECT run_id FROM run_counters ORDER BY newest_at DESC"
NUMBERS = "SELECT name, num FROM counters WHERE subject = ? AND num > 0 ORDER BY name"
NUM_BYTES = """
    SELECT (page_count - freelist_count) * page_size
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size
"""
SCORED = """
    SELECT g.group_id, g.task_id, g.served_index, g.parent_id, g.hook_hash,
           s.reward + CASE
           WHEN s.served THEN COALESCE((SELECT SUM(f.amount) FROM feedback AS f
                                        WHERE f.group_id = g.group_id AND f.state = 'joined'), 0)
           ELSE 0 END
    FROM groups AS g JOIN siblings AS s USING (group_id)
    WHERE g.state = 'scored' ORDER BY g.received_at, g.group_id, s."index"
"""
REQUEST_TEXTS = "SELECT request_json, question FROM groups WHERE group_id = ?"
ANSWER_TEXTS = """
    SELECT "index", text, message_json, tool_calls_json FROM siblings WHERE group_id = ?
"""
ANSWERED = """
    SELECT g.request_json, s.message_json, g.group_id
    FROM groups AS g JOIN siblings AS s USING (group_id)
    WHERE g.response_id = ? AND g.app_key IS ? AND s.served AND s.message_json IS NOT NULL
    AND NOT EXISTS (SELECT 1 FROM responses AS r WHERE r.response_id = g.response_id
                    AND r.owner = COALESCE(g.app_key, '') AND r.deleted_at >= g.received_at)
    ORDER BY g.received_at DESC LIMIT 1
"""
LATEST = f"""
    SELECT group_id FROM groups AS g
    WHERE kind IS NOT '{EVAL_KIND}' AND 2 <= (SELECT COUNT(*) FROM siblings AS s
                WHERE s.group_id = g.group_id AND s.message_json IS NOT NULL
                AND s.failure IS NOT '{BROKEN_OFF}')
    ORDER BY received_at DESC LIMIT 1
"""
TRAINED = """
    SELECT question, task_id FROM group_rows
    WHERE state IN ('trained', 'pooled') OR (state = 'scored' AND ?)
    OR group_id IN (SELECT group_id FROM feedback WHERE state IN ('trained', 'pooled')
                    OR edit_state IN ('trained', 'pooled'))
"""


MAX_MATCHES = 2
"""Maximum number of group ids that are returned for a prefix. Two ids are enough to show that the
prefix is ambiguous."""
_WITH_PREFIX = """
    SELECT group_id FROM groups WHERE group_id >= ?1 AND substr(group_id, 1, length(?1)) = ?1
    AND group_id < ?3 ORDER BY group_id <> ?1, received_at DESC LIMIT ?2
"""
_LATEST = """
    SELECT g.group_id FROM groups AS g WHERE EXISTS
    (SELECT 1 FROM calls AS c WHERE c.group_id = g.group_id)
    ORDER BY EXISTS
    (SELECT 1 FROM siblings AS s WHERE s.group_id = g.group_id AND s.trained) DESC,
    g.received_at DESC LIMIT 1
"""


EVAL_REWARDS = f"""
    SELECT g.group_id, g.eval_version, g.task_id, s.reward
    FROM group_rows AS g LEFT JOIN sibling_rows AS s
        ON s.group_id = g.group_id AND s."index" > 0 AND s.reward IS NOT NULL
    WHERE g.eval_id = ? AND g.kind = '{EVAL_KIND}' AND g.eval_version IS NOT NULL
    AND (g.hook_hash IS NULL OR g.hook_hash = ?)
    ORDER BY g.received_at, g.group_id, s."index"
"""
"""Query for the rewards of the samples at temperature 1 in an evaluation. The result of the query
has one row for each reward. If an evaluated dataset row has no rewards, the result has a single row
for it, in which the reward is NULL."""


_VERSIONS = """
    SELECT sibling, temperature, weight_versions_json, untrainable, replica FROM calls
    WHERE group_id = ? ORDER BY sibling, seq
"""


@dataclass(frozen=True, slots=True)
class CallVersions:
    """The weight versions, the temperature and the replica with which one recorded model call was
    sampled. The tokens are left out."""

    sibling: int
    temperature: float
    weight_versions: list[list[int]]
    """Spans [version, start, end]. Each version sampled the response's tokens from index `start` to
    index `end` - 1."""
    untrainable: str | None
    replica: str | None
    """Name of the rollout replica that sampled the call; None if it is unknown, or if the server
    had one rollout engine."""


class CallReads:
    """A reader of the recorded model calls, with the tokens that the engine reported. The methods
    block the thread."""

    def __init__(self, read_engine: Engine) -> None:
        self._read_engine = read_engine

    def group_ids(self, prefix: str) -> list[str]:
        """Return the ids of at most MAX_MATCHES groups (requests) whose ids begin with `prefix`. If
        an id is equal to `prefix`, it comes first."""
        with self._read_engine.connect() as db:
            return list(
                db.exec_driver_sql(
                    _WITH_PREFIX, (prefix, MAX_MATCHES, prefix + chr(0x10FFFF))
                ).scalars()
            )

    def latest_group_id(self) -> str | None:
        """Return the id of the newest trained group (request) with recorded model calls. If there
        is no such group, return the id of the newest group with recorded model calls. Return None
        if no group has recorded model calls."""
        with self._read_engine.connect() as db:
            return db.exec_driver_sql(_LATEST).scalar()

    def by_sibling(
        self, group_id: str, *, unknown_sets: str | None = None, sibling: int | None = None
    ) -> dict[int, list[CapturedCall]]:
        """Return the model calls of a group (request) as a dict. The dict maps the index of a
        sibling (sampled answer) to the sibling's model calls, in the order in which they were made.

        Old rows of the ledger do not say whether the tokens of a call were sampled from the whole
        vocabulary or from restricted sets of tokens. If `unknown_sets` is a text, such a call
        cannot be trained, and the text is the reason. If `unknown_sets` is None, the call counts as
        unrestricted.

        If `sibling` is not None, only the calls of the sibling with this index are returned.
        """
        query = select(CALLS).where(CALLS.c.group_id == group_id)
        if sibling is not None:
            query = query.where(CALLS.c.sibling == sibling)
        calls: defaultdict[int, list[CapturedCall]] = defaultdict(list)
        with self._read_engine.connect() as db:
            for row in db.execute(query.order_by(CALLS.c.sibling, CALLS.c.seq)):
                call = call_from_row(row)
                if row.shaped is None and call.untrainable is None:
                    call = call.model_copy(update={"untrainable": unknown_sets})
                calls[row.sibling].append(call)
        return dict(calls)

    def run_ids(self) -> dict[str, str | None]:
        """Return a dict from each group's id to the id of the server's run. The run's id is None if
        no server has pooled the group (kept it for training)."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql("SELECT group_id, run_id FROM group_rows").all()
        return {group_id: run_id for group_id, run_id in rows}

    def versions(self, group_id: str) -> list[CallVersions]:
        """Return a CallVersions for each model call of a group (request), ordered by sibling."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(_VERSIONS, (group_id,)).all()
        return [
            CallVersions(sibling, temperature, orjson.loads(versions), untrainable, replica)
            for sibling, temperature, versions, untrainable, replica in rows
        ]


def call_from_row(row: Row[Any]) -> CapturedCall:
    """Convert a row of the table `calls` to a CapturedCall, in which arrays are encoded as base64.
    CapturedCall is the form in which proxy and server exchange model calls."""
    return CapturedCall(
        prompt_ids=b64encode(row.prompt_ids).decode(),
        response_ids=b64encode(row.response_ids).decode(),
        logprobs=None if row.logprobs is None else b64encode(row.logprobs).decode(),
        weight_versions=orjson.loads(row.weight_versions_json),
        temperature=row.temperature,
        finish_reason=row.finish_reason,
        untrainable=row.untrainable,
        shaped=bool(row.shaped),
        replica=row.replica,
    )
