"""The ledger's counters: numbers and sums over all groups, updated with every change of a group.

Counting rows takes longer as the ledger grows. Therefore the proxy reads counters instead of
counting rows, wherever a user waits for the result.

The transaction that changes rows also changes the counters. For each changed group, the transaction
computes the amounts that the group adds to the counters before the change and after the change.
Then it adds the difference to the counters. The class `Deltas` computes the differences and does no
I/O. SQLite triggers count the feedback (see migrations.py).
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import orjson
from sqlalchemy import Connection

from fakevllm.ledger.records import EVAL_KIND
from fakevllm_runtime.contents import dbapi_connection

_CONTRIBUTIONS = """
    SELECT g.group_id, g.state, g.reason, COALESCE(g.run_id, ''), COALESCE(g.trained_step, g.step),
           COALESCE(g.hook_hash, ''), COALESCE(g.job_hash, ''), g.received_at, g.session_id,
           g.parent_session_id, g.app_key, g.turn, g.kind,
           COALESCE(SUM(s.completion_tokens), 0), GROUP_CONCAT(s.failure), COUNT(s.reward),
           COUNT(CASE WHEN NOT (g.served_by IS 'greedy' AND s."index" = 0) THEN s.reward END),
           COALESCE(SUM(CASE WHEN NOT (g.served_by IS 'greedy' AND s."index" = 0)
                        THEN s.reward END), 0.0),
           MIN(s.reward) IS MAX(s.reward),
           COUNT(CASE WHEN s.served THEN s.reward END),
           COALESCE(SUM(CASE WHEN s.served THEN s.reward END), 0.0),
           g.served_by IS 'random',
           COALESCE(SUM(CASE WHEN s.served THEN s.completion_tokens END), 0),
           COALESCE(SUM(CASE WHEN s.trained THEN s.completion_tokens END), 0)
    FROM group_rows AS g LEFT JOIN sibling_rows AS s USING (group_id)
    WHERE {} GROUP BY g.group_id
"""
_BY_ID = _CONTRIBUTIONS.format("g.group_id IN (SELECT value FROM json_each(?))")
_BY_SESSION = _CONTRIBUTIONS.format("g.session_id = ?")

_ADD = """
    INSERT INTO counters VALUES (?, ?, ?) ON CONFLICT (subject, name)
    DO UPDATE SET num = num + excluded.num
"""
_ADD_DIGEST = """
    INSERT INTO step_digests VALUES (?, ?, ?, ?, ?) ON CONFLICT (run_id, step, kind, digest)
    DO UPDATE SET num = num + excluded.num
"""
_FORGET_DIGEST = """
    DELETE FROM step_digests
    WHERE run_id = ? AND step = ? AND kind = ? AND digest = ? AND num <= 0
"""
_ADD_RUN_DIGEST = """
    INSERT INTO run_digests VALUES (?, ?, ?, ?) ON CONFLICT (run_id, kind, digest)
    DO UPDATE SET num = num + excluded.num
"""
_FORGET_RUN_DIGEST = """
    DELETE FROM run_digests WHERE run_id = ? AND kind = ? AND digest = ? AND num <= 0
"""
_STEP = "SELECT * FROM step_counters WHERE run_id = ? AND step = ?"
_PUT_STEP = "INSERT OR REPLACE INTO step_counters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_FORGET_STEP = "DELETE FROM step_counters WHERE run_id = ? AND step = ?"
_ADD_STEP_TOKENS = """
    INSERT INTO step_tokens VALUES (?, ?, ?, ?, ?) ON CONFLICT (run_id, step)
    DO UPDATE SET num_sampled = num_sampled + excluded.num_sampled,
    num_served = num_served + excluded.num_served, num_trained = num_trained + excluded.num_trained
"""
_FORGET_STEP_TOKENS = """
    DELETE FROM step_tokens WHERE run_id = ? AND step = ? AND num_sampled <= 0
"""
_ADD_RUN = """
    INSERT INTO run_counters VALUES (?1, ?2, ?3, ?4) ON CONFLICT (run_id)
    DO UPDATE SET newest_at = MAX(newest_at, ?2), num_groups = num_groups + ?3,
    num_steps = num_steps + ?4
"""
_FORGET_RUN = "DELETE FROM run_counters WHERE run_id = ? AND num_groups <= 0"
_FIND_NEWEST = """
    UPDATE run_counters SET newest_at = (
        SELECT MAX(received_at) FROM group_rows WHERE COALESCE(run_id, '') = ?1
        AND COALESCE(trained_step, step) IS NOT NULL
    ) WHERE run_id = ?1 AND newest_at <= ?2
"""
_SESSIONS = """
    SELECT * FROM session_counters WHERE session_id IN (SELECT value FROM json_each(?))
"""
_PUT_SESSION = "INSERT OR REPLACE INTO session_counters VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
_FORGET_SESSION = "DELETE FROM session_counters WHERE session_id = ?"

_KEY = "ledger_counters"


class Contribution(NamedTuple):
    """The amounts that one group (a request with its answers) adds to the counters."""

    group_id: str
    state: str
    reason: str | None
    run_id: str
    """Id of the server's training run; empty if the run is unknown."""
    step: int | None
    """Number of the training step that trained the group. For an untrained group: number of the
    step for which the server was collecting groups when the group ended."""
    hook_hash: str
    """Digest of the hook files; empty if the digest is unknown."""
    job_hash: str
    """Digest of the training job; empty if the digest is unknown."""
    received_at: float
    session_id: str | None
    parent_session_id: str | None
    app_key: str | None
    turn: int | None
    kind: str | None
    num_tokens: int
    failures: str | None
    """Slugs of the siblings' failures, with commas between them."""
    num_rewards: int
    num_samples: int
    """Number of rewards. The reward of a lead (sibling 0) that was sampled greedily is left out."""
    reward_sum: float
    """Sum of the rewards that `num_samples` counts."""
    is_flat: bool
    """Whether all rewards are equal."""
    num_served: int
    """Number of served siblings that have a reward: 0 or 1."""
    served_sum: float
    is_random: bool
    """Whether the served sibling was chosen at random."""
    num_served_tokens: int
    """Number of tokens of the answer that the app got."""
    num_trained_tokens: int
    """Number of tokens of the answers that were trained."""

    @property
    def run_position(self) -> tuple[str, float] | None:
        """The id of the group's run, and the time at which the group arrived. None if the group has
        no training step."""
        return None if self.step is None else (self.run_id, self.received_at)

    @property
    def session_facts(self) -> tuple[Any, ...]:
        """The values of this group that affect facts about its session, such as the number of the
        session's last turn. If one of these values changes, the facts must be computed again from
        all groups of the session."""
        return (*self[7:13],)


@dataclass(slots=True)
class StepSums:
    """Counts and reward sums of one training step, for the learning curve. Groups without a reward
    are left out."""

    num_groups: int = 0
    """Number of groups with a reward."""
    num_samples: int = 0
    """Number of siblings with a reward that are samples of the policy."""
    reward_sum: float = 0.0
    """Sum of the rewards of these siblings."""
    num_best: int = 0
    """Number of groups whose served sibling has a reward and was not chosen at random."""
    best_sum: float = 0.0
    """Sum of the rewards of these served siblings."""
    num_flat: int = 0
    """Number of groups whose rewards are all equal."""
    num_random: int = 0
    """Number of groups whose served sibling has a reward and was chosen at random."""
    random_sum: float = 0.0
    """Sum of the rewards of these served siblings."""

    def add(self, other: StepSums, sign: int = 1) -> None:
        """Add the counts and sums of `other` to this object, or subtract them if `sign` is -1."""
        self.num_groups += sign * other.num_groups
        self.num_samples += sign * other.num_samples
        self.num_best += sign * other.num_best
        self.num_flat += sign * other.num_flat
        self.num_random += sign * other.num_random
        self.reward_sum = _plus(self.reward_sum, sign * other.reward_sum)
        self.best_sum = _plus(self.best_sum, sign * other.best_sum)
        self.random_sum = _plus(self.random_sum, sign * other.random_sum)

    def row(self) -> tuple[Any, ...]:
        """Return the step's counts and sums in the order of the columns of the table
        `step_counters`. The columns `run_id` and `step` are left out."""
        return (
            *(self.num_groups, self.num_samples, self.reward_sum, self.num_best, self.best_sum),
            *(self.num_flat, self.num_random, self.random_sum),
        )


@dataclass(slots=True)
class TokenSums:
    """Numbers of tokens of the answers that were sampled for one training step."""

    num_sampled: int = 0
    num_served: int = 0
    num_trained: int = 0

    def add(self, group: Contribution, sign: int) -> None:
        """Add the tokens of a group's answers to the sums, or subtract them if `sign` is -1."""
        self.num_sampled += sign * group.num_tokens
        self.num_served += sign * group.num_served_tokens
        self.num_trained += sign * group.num_trained_tokens

    def row(self) -> tuple[int, int, int]:
        """Return the numbers in the order of the columns of the table `step_tokens`. The columns
        `run_id` and `step` are left out."""
        return (self.num_sampled, self.num_served, self.num_trained)


def _plus(total: float, value: float) -> float:
    # Rewards are finite, but the sum of huge rewards may overflow, and inf - inf would be NaN.
    return 0.0 if math.isnan(total + value) else total + value


def _step_sums(group: Contribution) -> StepSums:
    sums = StepSums(1, group.num_samples, group.reward_sum, num_flat=int(group.is_flat))
    if group.num_served:
        mean = group.served_sum / group.num_served
        if group.is_random:
            sums.num_random, sums.random_sum = 1, mean
        else:
            sums.num_best, sums.best_sum = 1, mean
    return sums


@dataclass(slots=True)
class SessionTotals:
    """The counters of one session, in the order of the columns of the table `session_counters`."""

    session_id: str
    """Id of the session."""
    parent_session_id: str | None = None
    """Id of the session that started this session; NULL if none did."""
    app_key: str | None = None
    """Fingerprint of the app's API key; NULL without a key."""
    turns: int | None = None
    """Number of turns."""
    num_groups: int = 0
    """Number of groups."""
    seen_at: float = -math.inf
    """Time of the newest group, in Unix seconds."""
    num_rewards: int = 0
    """Number of served siblings with a reward."""
    reward_sum: float = 0.0
    """Sum of the rewards of the served siblings."""
    first_group_id: str = ""
    """Id of the session's first group that is not a side request. If all groups are side requests:
    id of the first group."""
    first_is_side: bool = True
    """Whether this first group is a side request."""
    first_at: float = math.inf
    """Time at which this first group arrived, in Unix seconds."""

    def add(self, group: Contribution) -> None:
        """Add the values of `group` (a request with its answers) to these counters of the group's
        session."""
        self.num_groups += 1
        self.add_rewards(group, 1)
        self.parent_session_id = _largest(self.parent_session_id, group.parent_session_id)
        self.app_key = _largest(self.app_key, group.app_key)
        self.turns = _largest(self.turns, group.turn)
        self.seen_at = max(self.seen_at, group.received_at)
        place = (group.kind == "side", group.received_at, group.group_id)
        if place < (self.first_is_side, self.first_at, self.first_group_id):
            self.first_is_side, self.first_at, self.first_group_id = place

    def add_rewards(self, group: Contribution, sign: int) -> None:
        """Add the reward of the group's served sibling (the answer that the app got) to the
        session's counters, or subtract it if `sign` is -1."""
        self.num_rewards += sign * group.num_served
        self.reward_sum = _plus(self.reward_sum, sign * group.served_sum)

    def row(self) -> tuple[Any, ...]:
        """Return the session's counters in the order of the columns of the table
        `session_counters`."""
        return (
            *(self.session_id, self.parent_session_id, self.app_key, self.turns, self.num_groups),
            *(self.seen_at, self.num_rewards, self.reward_sum, self.first_group_id),
            *(self.first_is_side, self.first_at),
        )


def _largest(first: Any, second: Any) -> Any:
    return max((value for value in (first, second) if value is not None), default=None)


@dataclass(slots=True)
class Deltas:
    """The changes of the counters that one transaction causes."""

    numbers: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """Changes of the table `counters`, by (subject, name)."""
    steps: defaultdict[tuple[str, int], StepSums] = field(
        default_factory=lambda: defaultdict[tuple[str, int], StepSums](StepSums)
    )
    """Changes of the sums of the learning curves, by (run, step)."""
    step_tokens: defaultdict[tuple[str, int], TokenSums] = field(
        default_factory=lambda: defaultdict[tuple[str, int], TokenSums](TokenSums)
    )
    """Changes of the numbers of tokens, by (run, step)."""
    digests: Counter[tuple[str, int, str, str]] = field(
        default_factory=Counter[tuple[str, int, str, str]]
    )
    """Change of the number of groups with a digest, by (run, step, kind of the digest, digest)."""
    run_groups: Counter[str] = field(default_factory=Counter[str])
    run_arrivals: dict[str, float] = field(default_factory=dict[str, float])
    """For each run that groups have joined: the time at which the newest of these groups
    arrived."""
    run_departures: dict[str, float] = field(default_factory=dict[str, float])
    """For each run that groups have left: the time at which the newest of these groups arrived."""
    sessions: defaultdict[str, list[tuple[Contribution | None, Contribution]]] = field(
        default_factory=lambda: defaultdict[str, list[tuple[Contribution | None, Contribution]]](
            list
        )
    )
    """For each session, one pair (before, after) for each group that joined the session or has
    changed. `before` is the group's contribution before the transaction, or None if the group has
    joined the session."""
    recounted_sessions: set[str] = field(default_factory=set[str])
    """Sessions whose totals must be counted again from all groups, because a group has left the
    session, or because the `session_facts` of a group have changed."""

    def change(self, before: Contribution | None, after: Contribution | None) -> None:
        """Add the effect of one changed group on the counters: what the group adds to them after
        the transaction, minus what it added before the transaction. `before` is None for a new
        group. `after` is None for a deleted group."""
        if before == after:
            return
        for group, sign in ((before, -1), (after, 1)):
            if group is not None:
                self._add(group, sign)
        self._change_run(before, after)
        self._change_session(before, after)

    def _add(self, group: Contribution, sign: int) -> None:
        self.numbers["state", group.state] += sign
        if group.reason is not None:
            self.numbers["untrained", group.reason.partition(":")[0]] += sign
        if group.kind == EVAL_KIND:
            self.numbers["tokens", "evaluated"] += sign * group.num_tokens
        else:
            self.numbers["tokens", "sampled"] += sign * group.num_tokens
            self.numbers["tokens", "served"] += sign * group.num_served_tokens
            self.numbers["tokens", "trained"] += sign * group.num_trained_tokens
        for failure in (group.failures or "").split(","):
            if failure:
                self.numbers["failure", failure] += sign
        if group.step is None:
            return
        self.run_groups[group.run_id] += sign
        self.step_tokens[group.run_id, group.step].add(group, sign)
        if group.num_rewards == 0:
            return
        self.steps[group.run_id, group.step].add(_step_sums(group), sign)
        for kind, digest in (("hook", group.hook_hash), ("job", group.job_hash)):
            if digest:
                self.digests[group.run_id, group.step, kind, digest] += sign

    def _change_run(self, before: Contribution | None, after: Contribution | None) -> None:
        place = None if before is None else before.run_position
        new_place = None if after is None else after.run_position
        if place == new_place:
            return
        for moves, moved in ((self.run_departures, place), (self.run_arrivals, new_place)):
            if moved is not None:
                run_id, at = moved
                moves[run_id] = max(at, moves.get(run_id, at))

    def _change_session(self, before: Contribution | None, after: Contribution | None) -> None:
        is_moved = before is not None and (
            after is None or before.session_facts != after.session_facts
        )
        if is_moved and before is not None and before.session_id is not None:
            self.recounted_sessions.add(before.session_id)
        if after is not None and after.session_id is not None:
            self.sessions[after.session_id].append((None if is_moved else before, after))


@contextmanager
def counted(db: Connection) -> Generator[None]:
    """Update the counters for the changes that the `with` block makes to groups. The block must be
    a part of a transaction, and must call `watch` before it changes a group."""
    before: dict[str, Contribution | None] = {}
    db.info[_KEY] = before
    try:
        yield
        if before:
            _write(db, before)
    finally:
        del db.info[_KEY]


def add(db: Connection, subject: str, name: str, num: int) -> None:
    """Add `num` to the ledger's counter `name` of `subject`. This function is for counters that
    cannot be computed from the rows of groups."""
    if num:
        dbapi_connection(db).execute(_ADD, (subject, name, num))


def watch(db: Connection, group_ids: Iterable[str]) -> None:
    """Remember the amounts that the groups `group_ids` now add to the counters. Call this function
    before the groups are changed. At the end of the `with` block of `counted`, the amounts are read
    again, and the differences are added to the counters."""
    before = cast(dict[str, Contribution | None], db.info[_KEY])
    new = [group_id for group_id in group_ids if group_id not in before]
    if new:
        found = _contributions(db, new)
        before |= {group_id: found.get(group_id) for group_id in new}


def _contributions(db: Connection, group_ids: Iterable[str]) -> dict[str, Contribution]:
    ids = orjson.dumps(list(group_ids)).decode()
    return {row[0]: Contribution(*row) for row in dbapi_connection(db).execute(_BY_ID, (ids,))}


def _write(db: Connection, before: Mapping[str, Contribution | None]) -> None:
    after = _contributions(db, before)
    deltas = Deltas()
    for group_id, contribution in before.items():
        deltas.change(contribution, after.get(group_id))
    driver = dbapi_connection(db)
    numbers = [(*key, num) for key, num in deltas.numbers.items() if num]
    driver.executemany(_ADD, numbers)
    _write_tokens(driver, deltas)
    _write_digests(driver, deltas)
    _write_runs(driver, deltas, _write_steps(driver, deltas))
    _write_sessions(driver, deltas)


def _write_tokens(driver: sqlite3.Connection, deltas: Deltas) -> None:
    rows = [(*key, *sums.row()) for key, sums in deltas.step_tokens.items() if any(sums.row())]
    driver.executemany(_ADD_STEP_TOKENS, rows)
    driver.executemany(_FORGET_STEP_TOKENS, [row[:2] for row in rows if row[2] < 0])


def _write_digests(driver: sqlite3.Connection, deltas: Deltas) -> None:
    by_step = [(*key, num) for key, num in deltas.digests.items() if num]
    of_runs: Counter[tuple[str, str, str]] = Counter()
    for run_id, _, kind, digest, num in by_step:
        of_runs[run_id, kind, digest] += num
    driver.executemany(_ADD_DIGEST, by_step)
    driver.executemany(_ADD_RUN_DIGEST, [(*key, num) for key, num in of_runs.items() if num])
    fewer = [row for row in by_step if row[-1] < 0]
    driver.executemany(_FORGET_DIGEST, [row[:4] for row in fewer])
    driver.executemany(_FORGET_RUN_DIGEST, [(row[0], row[2], row[3]) for row in fewer])


def _write_steps(driver: sqlite3.Connection, deltas: Deltas) -> Counter[str]:
    """Write the changed sums of training steps. Return for each run how many steps it has gained
    (negative if it has lost steps)."""
    num_steps: Counter[str] = Counter()
    for key, sums in deltas.steps.items():
        row = driver.execute(_STEP, key).fetchone()
        total = StepSums() if row is None else StepSums(*row[2:])
        total.add(sums)
        num_steps[key[0]] += (total.num_groups > 0) - (row is not None)
        if total.num_groups > 0:
            driver.execute(_PUT_STEP, (*key, *total.row()))
        else:
            driver.execute(_FORGET_STEP, key)
    return num_steps


def _write_runs(driver: sqlite3.Connection, deltas: Deltas, num_steps: Counter[str]) -> None:
    for run_id in deltas.run_groups:
        newest_at = deltas.run_arrivals.get(run_id, -math.inf)
        num_groups = deltas.run_groups[run_id]
        if num_groups or num_steps[run_id] or run_id in deltas.run_arrivals:
            driver.execute(_ADD_RUN, (run_id, newest_at, num_groups, num_steps[run_id]))
        if num_groups < 0:
            driver.execute(_FORGET_RUN, (run_id,))
        if run_id in deltas.run_departures:
            driver.execute(_FIND_NEWEST, (run_id, deltas.run_departures[run_id]))


def _write_sessions(driver: sqlite3.Connection, deltas: Deltas) -> None:
    changed = [one for one in deltas.sessions if one not in deltas.recounted_sessions]
    ids = orjson.dumps(changed).decode()
    stored = {row[0]: SessionTotals(*row) for row in driver.execute(_SESSIONS, (ids,))}
    rows: list[tuple[Any, ...]] = []
    for session_id in changed:
        totals = stored.get(session_id) or SessionTotals(session_id)
        for before, after in deltas.sessions[session_id]:
            if before is None:
                totals.add(after)
            else:
                totals.add_rewards(before, -1)
                totals.add_rewards(after, 1)
        rows.append(totals.row())
    driver.executemany(_PUT_SESSION, rows)
    for session_id in deltas.recounted_sessions:
        totals = SessionTotals(session_id)
        for row in driver.execute(_BY_SESSION, (session_id,)):
            totals.add(Contribution(*row))
        if totals.num_groups:
            driver.execute(_PUT_SESSION, totals.row())
        else:
            driver.execute(_FORGET_SESSION, (session_id,))
