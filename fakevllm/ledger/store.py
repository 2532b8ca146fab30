"""The ledger: one SQLite file with what the app asked and got, what it was worth, what was trained.

Writing never waits and never raises: see writer.py. Reading uses connections of its own, sees what
has been written, and blocks: call it off the event loop. Another process may read at any time.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import URL, Connection, Engine, NullPool, QueuePool, create_engine, event, select
from sqlalchemy.exc import DatabaseError

from fakevllm.errors import LedgerError
from fakevllm.hooks.recorded import RecordedGroup
from fakevllm.ledger import changes as statements
from fakevllm.ledger import reads
from fakevllm.ledger.feedback_rows import FeedbackRows
from fakevllm.ledger.migrations import migrate
from fakevllm.ledger.prior_answers import messages_asked
from fakevllm.ledger.reads import CallReads, KeptAnswers
from fakevllm.ledger.records import (
    AnsweredRequest,
    GroupRecord,
    LedgerHealth,
    ScoredGroup,
    SiblingRecord,
    StepRow,
)
from fakevllm.ledger.session_reads import SessionReads
from fakevllm.ledger.tables import GROUPS, SIBLINGS, TASKS
from fakevllm.ledger.writer import Writer, WriteReceipt
from fakevllm_adapters.protocol.swarm import CapturedCall, LogEntry, Task

BUSY_TIMEOUT_S = 5.0
"""How long a write waits for another process that holds the file's lock."""
FLUSH_TIMEOUT_S = 30.0

_Change = GroupRecord | Callable[[Connection], None]


class Ledger:
    """Owns the file's writer thread and connections; close() last."""

    def __init__(self, writing: Engine, reading: Engine) -> None:
        self._writing = writing
        self._db = writing.connect()  # the writer's: taking one costs more than a row
        self._reading = reading
        self._writer: Writer[_Change] = Writer(self._transact)
        self.sessions = SessionReads(reading)
        self.calls = CallReads(reading)
        self.kept = KeptAnswers(reading, self._writer.put)
        self.feedback = FeedbackRows(reading, self._writer.put)

    @staticmethod
    def open(path: Path, busy_timeout_s: float = BUSY_TIMEOUT_S) -> Ledger:
        """Creates or updates the file. Raises LedgerError."""
        path = path.expanduser()
        writing = _writing_engine(path, busy_timeout_s)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # SQLite gives its -wal and -shm files the mode of the file.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            path.chmod(0o600)
            with writing.begin() as db:
                migrate(db)
        except (OSError, DatabaseError, sqlite3.Error, LedgerError) as error:
            writing.dispose()
            cause = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
            message = f"the ledger {path} cannot be opened: {cause}; move it away or name another"
            raise LedgerError(message) from error
        return Ledger(writing, _engine(path, busy_timeout_s))

    def close(self) -> None:
        """Writes what waits first."""
        self._writer.close(FLUSH_TIMEOUT_S)
        self._db.close()
        self._reading.dispose()
        self._writing.dispose()

    @property
    def health(self) -> LedgerHealth:
        return LedgerHealth(self._writer.num_dropped, self._writer.num_waiting, self._writer.error)

    def record(self, group: GroupRecord) -> WriteReceipt:
        """Record a request with its siblings; a later record of the same group replaces it."""
        return self._writer.put(group)

    def settle(
        self,
        group_id: str,
        state: str,
        reason: str | None,
        step: int | None,
        calls: Sequence[Sequence[CapturedCall]],
        run_id: str | None = None,
    ) -> None:
        """The server's reply to the end of a recorded group; `calls` by sibling index."""
        change = partial(statements.settle, group_id=group_id, state=state, reason=reason)
        self._writer.put(partial(change, step=step, calls=calls, run_id=run_id))

    def apply_log(self, run_id: str, entries: Sequence[LogEntry]) -> None:
        """The run's log from the cursor on. Each entry counts once, however often it is brought."""
        self._writer.put(partial(statements.apply_log, run_id=run_id, entries=entries))

    def put_tasks(self, tasks: Sequence[Task]) -> None:
        self._writer.put(partial(statements.put_tasks, tasks=tasks))

    async def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until every earlier change is written or dropped; return False at the timeout.

        The receipt of a change then says which of the two happened. Uses no thread.
        """
        return await self._writer.flush(timeout_s)

    async def is_written(self, *receipts: WriteReceipt, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Flush, then return whether each of these changes is in the file.

        Other changes of the same flush do not count. The receipt of a dropped change has the error.
        """
        return await self.flush(timeout_s) and all(receipt.is_written for receipt in receipts)

    def drain(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """flush() for threads."""
        return self._writer.drain(timeout_s)

    def log_cursor(self, run_id: str) -> int:
        """Number of the last entry of this run's log that has been applied, 0 before the first."""
        with self._reading.connect() as db:
            return statements.read_cursor(db, run_id)

    def task_secret(self) -> bytes:
        """Signs task keys; made once and kept with the file. Raises LedgerError."""
        try:
            with self._writing.begin() as db:
                return statements.task_secret(db)
        except (DatabaseError, sqlite3.Error) as error:
            cause = getattr(error, "orig", None) or error
            raise LedgerError(f"the ledger cannot be written: {cause}") from error

    def scored_groups(self) -> list[ScoredGroup]:
        """Groups that wait for the server's word, oldest first."""
        with self._reading.connect() as db:
            rows = db.exec_driver_sql(reads.SCORED).all()
        found: list[ScoredGroup] = []
        for of, rows_of_group in itertools.groupby(rows, lambda row: row[:5]):
            group_id, task_id, question, served, parent_id = of
            rewards = [row[5] for row in rows_of_group]
            found.append(ScoredGroup(group_id, task_id, question, rewards, served, parent_id))
        return found

    def tasks(self) -> list[Task]:
        with self._reading.connect() as db:
            return [_task(row) for row in db.execute(select(TASKS)).mappings()]

    def runs(self) -> list[str]:
        """The server's runs that have points of a curve here, the newest first; those of before
        they were noted are one, of no name."""
        with self._reading.connect() as db:
            return list(db.exec_driver_sql(reads.RUNS).scalars())

    def curve(self, run_id: str) -> list[StepRow]:
        """Of one run, by the step that trained a group, or else in which it ended; ties
        included."""
        with self._reading.connect() as db:
            return [StepRow(*row) for row in db.exec_driver_sql(reads.CURVE, (run_id,))]

    def counts(self) -> dict[str, int]:
        """Groups by state."""
        query = "SELECT state, COUNT(*) FROM groups GROUP BY state ORDER BY state"
        with self._reading.connect() as db:
            return {state: count for state, count in db.exec_driver_sql(query)}

    def untrained(self) -> dict[str, int]:
        """Groups that were not trained, by the reason's first word: what is behind a colon tells
        one from the other."""
        with self._reading.connect() as db:
            return {reason: count for reason, count in db.exec_driver_sql(reads.UNTRAINED)}

    def failures(self) -> dict[str, int]:
        """Siblings of groups whose answers were none, by whose fault and how."""
        with self._reading.connect() as db:
            return {failure: count for failure, count in db.exec_driver_sql(reads.FAILURES)}

    def sampled_tokens(self) -> int:
        """Of all siblings, as the engine counted them."""
        with self._reading.connect() as db:
            total = db.exec_driver_sql("SELECT SUM(completion_tokens) FROM siblings").scalar()
        return int(total or 0)

    def group(self, group_id: str) -> GroupRecord | None:
        of_group = GROUPS.c.group_id == group_id
        of_siblings = SIBLINGS.c.group_id == group_id
        with self._reading.connect() as db:
            row = db.execute(select(GROUPS).where(of_group)).mappings().one_or_none()
            query = select(SIBLINGS).where(of_siblings).order_by(SIBLINGS.c.index)
            siblings = [_sibling(one) for one in db.execute(query).mappings()]
        return None if row is None else GroupRecord(**row, siblings=siblings)

    def answered(self, response_id: str, app_key: str | None) -> AnsweredRequest | None:
        """That app's latest request whose answer is called so, with the message it got: an app may
        choose the name, and choose it twice."""
        with self._reading.connect() as db:
            row = db.exec_driver_sql(reads.ANSWERED, (response_id, app_key)).one_or_none()
        return None if row is None else AnsweredRequest(*row)

    def latest_group(self) -> RecordedGroup | None:
        """The newest group with at least two answers, as hooks get it."""
        with self._reading.connect() as db:
            group_id = db.exec_driver_sql(reads.LATEST).scalar()
        group = None if group_id is None else self.group(group_id)
        return None if group is None else self._recorded(group)

    def _recorded(self, group: GroupRecord) -> RecordedGroup:
        with self._reading.connect() as db:
            query = select(TASKS).where(TASKS.c.task_id == group.task_id)
            row = db.execute(query).mappings().one_or_none()
        task = Task(task_id=group.task_id or "") if row is None else _task(row)
        answered = [one for one in group.siblings if one.message_json is not None]
        return RecordedGroup(
            group.group_id,
            task,
            group.question,
            [_message(one) for one in answered],
            [_usage(one) for one in answered],
            messages_asked(
                group.route, group.request_json, lambda name: self.answered(name, group.app_key)
            ),
        )

    def _transact(self, changes: Sequence[_Change]) -> bool:
        db = self._db
        with db.begin():
            before = statements.driver_of(db).total_changes
            for is_record, run in itertools.groupby(changes, lambda c: isinstance(c, GroupRecord)):
                if is_record:
                    statements.put_groups(db, [one for one in run if isinstance(one, GroupRecord)])
                else:
                    _make(db, run)
            return statements.driver_of(db).total_changes > before


def _make(db: Connection, changes: Iterable[_Change]) -> None:
    for change in changes:
        assert not isinstance(change, GroupRecord)
        change(db)


def _writing_engine(path: Path, busy_timeout_s: float) -> Engine:
    engine = _engine(path, busy_timeout_s, is_kept=True)

    def begin(db: Connection) -> None:
        # Takes the write lock before reading: a cursor that was read cannot be stale when written.
        db.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "begin", begin)
    return engine


def _engine(path: Path, busy_timeout_s: float, *, is_kept: bool = False) -> Engine:
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, poolclass=QueuePool if is_kept else NullPool)

    def connect(connection: Any, _: object) -> None:
        # sqlite3 itself begins no transaction, so DDL is inside ours.
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout = {int(busy_timeout_s * 1000)}",
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "foreign_keys = ON",
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    event.listen(engine, "connect", connect)
    return engine


def _task(row: Any) -> Task:
    metadata = orjson.loads(row["metadata_json"])
    return Task(task_id=row["task_id"], main_query=row["main_query"], metadata=metadata)


def _sibling(row: Any) -> SiblingRecord:
    return SiblingRecord(**{key: value for key, value in row.items() if key != "group_id"})


def _message(sibling: SiblingRecord) -> dict[str, Any]:
    message: dict[str, Any] = orjson.loads(sibling.message_json or "{}")
    return message | {"finish_reason": sibling.finish_reason}


def _usage(sibling: SiblingRecord) -> dict[str, Any]:
    counts = {
        "prompt_tokens": sibling.prompt_tokens,
        "completion_tokens": sibling.completion_tokens,
    }
    return {key: value for key, value in counts.items() if value is not None}
