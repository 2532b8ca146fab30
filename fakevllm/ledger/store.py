"""The ledger: the proxy's SQLite file with the apps' requests, the sampled answers, their rewards,
and what was trained.

Methods that write never wait and never raise, because a separate thread does the writing (see
writer.py).

Methods that read use other database connections, and see only changes that are already in the file.
These methods block the thread, so do not call them on the event loop. Other processes may read the
file at any time.
"""

from __future__ import annotations

import itertools
import os
import sqlite3
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from sqlalchemy import URL, Connection, Engine, NullPool, QueuePool, create_engine, event, select
from sqlalchemy.exc import DatabaseError

from fakevllm.admission.task_index import normalised
from fakevllm.errors import LedgerError
from fakevllm.hooks.recorded_group import RecordedGroup
from fakevllm.ledger import reads, row_changes
from fakevllm.ledger.arm_reads import ArmReads
from fakevllm.ledger.conversation_history import (
    recorded_chat,
    recorded_user_texts,
)
from fakevllm.ledger.counters import counted
from fakevllm.ledger.curve_reads import CurveEnds
from fakevllm.ledger.edit_rows import EditRows
from fakevllm.ledger.feedback_rows import FeedbackRows
from fakevllm.ledger.forgotten_groups import ForgottenGroups
from fakevllm.ledger.group_reads import GroupReads
from fakevllm.ledger.migrations import MIGRATIONS
from fakevllm.ledger.reads import CallReads
from fakevllm.ledger.recorded_groups import RecordedGroups, task_from_row
from fakevllm.ledger.records import (
    AnsweredRequest,
    EvaluatedRewards,
    GroupRecord,
    LedgerHealth,
    ScoredGroup,
    StepRow,
    StoredTask,
)
from fakevllm.ledger.redacted_records import PartsToRedact, RecordRedactor, hashed_id
from fakevllm.ledger.rescored_rows import RescoredRows
from fakevllm.ledger.session_reads import SessionReads
from fakevllm.ledger.stored_groups import StoredGroups
from fakevllm.ledger.stored_responses import StoredResponses
from fakevllm.ledger.summary_reads import SummaryReads
from fakevllm.ledger.tables import TASKS
from fakevllm.ledger.undelivered_answers import KeptAnswers
from fakevllm.ledger.writer import Writer, WriteReceipt
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings
from fakevllm_adapters.protocol.swarm import CapturedCall, LogEntry, Task
from fakevllm_runtime.contents import content_store, dbapi_connection
from fakevllm_runtime.erasure import SECURE_DELETE, truncate_log
from fakevllm_runtime.migrations import NewerSchemaError, migrate
from fakevllm_runtime.path_access import is_refused_access, unusable_message

BUSY_TIMEOUT_S = 5.0
"""Maximum seconds for which a write waits while another process holds the lock of the file."""
FLUSH_TIMEOUT_S = 30.0
"""Maximum seconds for which `flush` waits until all queued changes are written. The same limit
applies to `close`."""

_Change = GroupRecord | Callable[[Connection], None]


class Ledger:
    """The open ledger (the proxy's SQLite file). It owns the thread that writes, and the database
    connections. Stop everything that writes to the ledger before you close the ledger.

    The attributes `sessions`, `calls`, `arms` and `stored_groups` read the tables of their
    subjects. The attributes `kept_answers`, `responses`, `feedback`, `edits` and `rescored` read
    and write the tables of their subjects. The attribute `forgotten` deletes contents of groups.
    """

    def __init__(
        self, write_engine: Engine, read_engine: Engine, redaction: RedactionInUse | None = None
    ) -> None:
        """Open the database connections. `redaction` is applied to everything that is written. If
        it is None, nothing is redacted."""
        self._write_engine = write_engine
        # Kept open for the writer: opening a connection costs more than writing a row.
        self._write_db = write_engine.connect()
        self._read_engine = read_engine
        secret = b"" if redaction is None else self._random_bytes(row_changes.id_secret)
        self._redactor = RecordRedactor(redaction or RedactionInUse(PrivacySettings()), secret)
        self._writer: Writer[_Change] = Writer(self._transact)
        self._groups = GroupReads(read_engine)
        self._summary = SummaryReads(read_engine)
        self._recorded = RecordedGroups(read_engine, self._redactor.id)
        self.sessions = SessionReads(read_engine)
        self.calls = CallReads(read_engine)
        self.arms = ArmReads(read_engine)
        self.stored_groups = StoredGroups(read_engine)
        self.kept_answers = KeptAnswers(read_engine, self._writer.put, self._redactor)
        self.responses = StoredResponses(read_engine, self._writer.put, self._redactor)
        self.feedback = FeedbackRows(read_engine, self._writer.put, self._redactor)
        self.edits = EditRows(read_engine, self._writer.put, self._redactor)
        self.rescored = RescoredRows(read_engine, self._writer.put, self._redactor)
        self.forgotten = ForgottenGroups(read_engine, self._writer.put)

    @staticmethod
    def open(
        path: Path,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        *,
        redaction: RedactionInUse | None = None,
    ) -> Ledger:
        """Open the ledger file, and return the ledger. If needed, the file is created, or its
        tables are migrated to the current schema. `redaction` is applied to everything that is
        written from now on.

        Raises LedgerError if the file cannot be used, or if it was written by a newer version of
        fakevllm.
        """
        path = path.expanduser()
        write_engine = _write_engine(path, busy_timeout_s)
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # SQLite creates its -wal and -shm files with the mode of this file.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            path.chmod(0o600)
            with write_engine.begin() as db:
                migrate(db, MIGRATIONS, f"the ledger {path}")
        except NewerSchemaError as error:
            write_engine.dispose()
            raise LedgerError(
                f"the ledger {path} was written by a newer fakevllm ({error}); "
                "update fakevllm, or use another file"
            ) from error
        except (OSError, DatabaseError, sqlite3.Error) as error:
            write_engine.dispose()
            if isinstance(error, OSError) and is_refused_access(error):
                message = unusable_message(path, error, "choose another --run-dir")
                raise LedgerError(f"The ledger {message}") from error
            cause = getattr(error, "orig", None) or getattr(error, "strerror", None) or error
            message = f"the ledger {path} cannot be opened: {cause}; move it away or name another"
            raise LedgerError(message) from error
        return Ledger(write_engine, _engine(path, busy_timeout_s), redaction)

    @contextmanager
    def reading(self) -> Generator[None]:
        """Raise LedgerError if a read of the ledger in the `with` block fails.

        A read fails if the file is damaged. Damage is not detected when the ledger is opened,
        because checking a large file would take too long.
        """
        try:
            yield
        except (DatabaseError, sqlite3.Error, ValueError, TypeError, KeyError) as error:
            cause = str(getattr(error, "orig", None) or error).partition("\n")[0]
            path = self._read_engine.url.database
            message = f"the ledger {path} cannot be read ({cause}); move it away or name another"
            raise LedgerError(message) from error

    def close(self) -> None:
        """Write the queued changes, then close the database connections."""
        self._writer.close(FLUSH_TIMEOUT_S)
        self._write_db.close()
        self._read_engine.dispose()
        self._write_engine.dispose()

    @property
    def health(self) -> LedgerHealth:
        """The condition of the thread that writes the ledger."""
        return LedgerHealth(self._writer.num_dropped, self._writer.num_waiting, self._writer.error)

    def record(self, group: GroupRecord) -> WriteReceipt:
        """Queue the record of a request with its siblings (sampled answers). The writer's thread
        writes it later. If the same group is recorded again, the new record replaces the old one.
        """
        return self._writer.put(group)

    def settle(
        self,
        group_id: str,
        state: str,
        reason: str | None,
        step: int | None,
        calls: Sequence[Sequence[CapturedCall]],
        run_id: str | None = None,
        job_hash: str | None = None,
        prompts: Sequence[bytes] = (),
    ) -> None:
        """Queue the server's reply to the rewards of a group (a request with its sampled answers).
        The writer's thread writes it later. Call `record` for the group first.

        `calls[i]` has the model calls of sibling i (the i-th sampled answer), in order. `job_hash`
        is the digest of the server's training job, or None if the server did not send it. `prompts`
        are the prompts to which calls refer by index.
        """
        settle = partial(row_changes.settle, group_id=group_id, state=state, reason=reason)
        settle = partial(settle, step=step, prompts=prompts, run_id=run_id, job_hash=job_hash)

        def change(db: Connection) -> None:
            settle(db, calls=self._redactor.calls(db, group_id, calls))

        self._writer.put(change)

    def apply_log(self, run_id: str, entries: Sequence[LogEntry]) -> None:
        """Let the writer apply entries of the server's run log to the ledger. The run log
        reports which groups were trained, dropped or lost. Entries that were already applied have
        no effect."""
        self._writer.put(partial(row_changes.apply_log, run_id=run_id, entries=entries))

    def put_tasks(self, tasks: Sequence[Task], owner: str | None = None) -> None:
        """Queue dataset tasks to be written. A task replaces the stored task with the same id.

        `owner`: fingerprint of the API key that registered the tasks, or None if the proxy requires
        no key.
        """

        def change(db: Connection) -> None:
            redacted = [self._redactor.task(task) for task in tasks]
            row_changes.put_tasks(db, tasks=redacted, owner=owner)

        self._writer.put(change)

    async def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until every change that was queued before this call is written or dropped. Return
        True when this is the case. Return False at the timeout, or at once if the queue is full.

        After the result True, the receipt of each change shows whether this change was written or
        dropped. This method does not block the thread.
        """
        return await self._writer.flush(timeout_s)

    async def is_written(self, *receipts: WriteReceipt, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until some queued changes are written or dropped. A receipt is the outcome of one
        change. Return True if all changes with these receipts are written. Return False if at least
        one of them was dropped, or at the timeout.

        Other dropped changes do not affect the result. The receipt of a dropped change has the
        error.
        """
        return await self.flush(timeout_s) and all(receipt.is_written for receipt in receipts)

    def drain(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Block the calling thread until every change that was queued before this call is written
        or dropped. Return True when this is the case, and False at the timeout."""
        return self._writer.drain(timeout_s)

    def truncate_log(self, timeout_s: float) -> bool:
        """Truncate the write-ahead log, so that it has no bytes of deleted contents. Return False
        if other processes still read an old state of the ledger at the timeout. The method blocks
        the thread."""
        return truncate_log(Path(str(self._read_engine.url.database)), timeout_s)

    def log_cursor(self, run_id: str) -> int:
        """Return the number of the last entry of this training run's log that was applied to the
        ledger. Return 0 if no entry was applied. Raises LedgerError if the ledger cannot be read.
        """
        with self.reading(), self._read_engine.connect() as db:
            return row_changes.read_cursor(db, run_id)

    def task_secret(self) -> bytes:
        """Return the secret with which the proxy signs task keys (API keys that name a dataset task
        each). Each ledger file has its own secret. Raises LedgerError if the secret cannot be
        created."""
        return self._random_bytes(row_changes.task_secret)

    def arm_salt(self) -> bytes:
        """Return the salt with which sessions are assigned to arms. An arm decides which weights
        answer a session. Each ledger file has its own salt, because the arms of the sessions in the
        file must not change. Raises LedgerError if the salt cannot be created."""
        return self._random_bytes(row_changes.arm_salt)

    def _random_bytes(self, read_or_create: Callable[[Connection], bytes]) -> bytes:
        try:
            with self._write_engine.begin() as db:
                return read_or_create(db)
        except (DatabaseError, sqlite3.Error) as error:
            cause, path = getattr(error, "orig", None) or error, self._read_engine.url.database
            message = f"the ledger {path} cannot be written: {cause}; move it away or name another"
            raise LedgerError(message) from error

    def scored_groups(self) -> list[ScoredGroup]:
        """Return the groups (requests with their sampled answers) whose rewards the server has not
        acknowledged yet, oldest first."""
        with self._read_engine.connect() as db:
            rows = db.exec_driver_sql(reads.SCORED).all()
        groups: list[ScoredGroup] = []
        for group, siblings in itertools.groupby(rows, lambda row: row[:5]):
            group_id, task_id, served, parent_id, hook_hash = group
            rewards = [row[5] for row in siblings]
            groups.append(ScoredGroup(group_id, task_id, rewards, served, parent_id, hook_hash))
        return groups

    def tasks(self) -> list[StoredTask]:
        """Return all stored tasks (rows of datasets that were registered at the proxy)."""
        with self._read_engine.connect() as db:
            rows = db.execute(select(TASKS)).mappings()
            return [StoredTask(task_from_row(row), row["owner"]) for row in rows]

    def runs(self) -> list[str]:
        """Return the ids of the server's training runs that have a learning curve in this ledger,
        newest first.

        Older versions of the ledger stored no run ids. All groups without a run id are treated as
        one run with the id "".
        """
        return self._summary.runs()

    def curve(self, run_id: str) -> list[StepRow]:
        """Return the learning curve of one training run. The curve has the mean rewards of each
        step, in the order of the steps.

        A group is a request with its sampled answers. A trained group counts in the step that
        trained it. Any other group counts in the step during which the group ended. Groups whose
        rewards are all equal count too.
        """
        return self._summary.curve(run_id)

    def curve_ends(self, run_id: str) -> CurveEnds:
        """Return the beginning and the end of one run's learning curve, with a few steps each. Only
        steps since the last change of the hooks or the job are included."""
        return self._summary.curve_ends(run_id)

    def counts(self) -> dict[str, int]:
        """Return the number of groups (requests with their sampled answers) in each state."""
        return self._summary.numbers("state")

    def untrained(self) -> dict[str, int]:
        """Return the number of groups (requests with their sampled answers) that were not trained,
        for each reason.

        Details after a colon in the reason are ignored, because they differ from group to group.
        """
        return self._summary.numbers("untrained")

    def failures(self) -> dict[str, int]:
        """Return the number of unusable answers for each cause (a slug such as `cut_off`)."""
        return self._summary.numbers("failure")

    def sampled_tokens(self) -> int:
        """Return the total number of tokens in all answers that were sampled for requests of apps,
        as the engine counted them."""
        return self._summary.numbers("tokens").get("sampled", 0)

    def num_bytes(self) -> int:
        """Return the size of the ledger's content, without free pages of the file."""
        with self._read_engine.connect() as db:
            return db.exec_driver_sql(reads.NUM_BYTES).scalar_one()

    def group(self, group_id: str) -> GroupRecord | None:
        """Return the group with this id: a request with its siblings (sampled answers), in the
        order of their indices. Return None if the ledger does not have the group."""
        return self._groups.group(group_id)

    def parts_to_redact(self, record: GroupRecord) -> PartsToRedact:
        """Return the parts of a group that the present settings redact. The group may have been
        stored before these settings were made."""
        return self._redactor.parts_to_redact(record)

    @property
    def redactor(self) -> RecordRedactor:
        """The redactor of everything that is written to the ledger."""
        return self._redactor

    def hidden_id(self, value: str) -> str:
        """Return the form in which the ledger stores an id that an app has chosen. The form is a
        keyed hash if the id has text that is redacted. Otherwise it is the id itself."""
        return self._redactor.id(value)

    def stored_ids(self, value: str) -> tuple[str, str]:
        """Return the two forms in which the ledger may have an id that an app has chosen. One form
        is the id itself. The other is the hash that replaces an id with redacted text. Raises
        LedgerError if the ledger cannot be read."""
        return value, hashed_id(self._random_bytes(row_changes.id_secret), value)

    def answered_request(self, response_id: str, app_key: str | None) -> AnsweredRequest | None:
        """Return the app's latest request whose answer has this response id, or None. The class
        `RecordedGroups` documents the parameters."""
        return self._recorded.answered_request(response_id, app_key)

    def trained(
        self, questions: Sequence[str], task_ids: Sequence[str], *, with_unsent: bool = True
    ) -> tuple[set[str], set[str]]:
        """Return the `questions` and `task_ids` that were trained or wait to be trained.

        A question or task was trained if a group (a request with its sampled answers) with this
        question or task was trained. If `with_unsent` is True, groups that were not sent to the
        server yet count too. A group also counts if only its served answer was trained, by late
        feedback. Questions are compared without case and white space. They are returned in the
        ledger's spelling. The method reads all trained groups.
        """
        texts, ids = set(map(normalised, questions)), set(task_ids)
        found_questions, found_ids = set[str](), set[str]()
        with self._read_engine.connect() as db:
            for question, task_id in db.exec_driver_sql(reads.TRAINED, (with_unsent,)):
                if normalised(question) in texts:
                    found_questions.add(question)
                if task_id in ids:
                    found_ids.add(task_id)
        return found_questions, found_ids

    def evaluated_rows(self, eval_id: str, hook_hash: str) -> list[EvaluatedRewards]:
        """Return the rewards of the dataset rows that were sampled for an evaluation, in the order
        in which the rows were requested. A row that was sampled several times is returned several
        times. The method reads all groups.

        A row is left out if the version of the weights is unknown, or if hooks with another content
        hash than `hook_hash` scored the row.
        """
        with self._read_engine.connect() as db:
            lines = db.exec_driver_sql(reads.EVAL_REWARDS, (eval_id, hook_hash)).all()
        rows: list[EvaluatedRewards] = []
        for (_, version, task_id), siblings in itertools.groupby(lines, lambda line: line[:3]):
            rewards = [line[3] for line in siblings if line[3] is not None]
            rows.append(EvaluatedRewards(version, task_id or "", rewards))
        return rows

    def latest_group(self) -> RecordedGroup | None:
        """Return the newest request with at least two sampled answers, as a RecordedGroup on which
        the user's hooks can be run. Return None if there is no such request."""
        with self._read_engine.connect() as db:
            group_id = db.exec_driver_sql(reads.LATEST).scalar()
        group = None if group_id is None else self.group(group_id)
        return None if group is None else self.recorded(group)

    def user_texts(self, group_id: str, task: Task | None = None) -> list[str]:
        """Return the texts of a group by which its dataset row can be recognised. The texts are the
        group's question, the text of its task, and the first and the last user message of its
        conversation. The list is empty if the ledger does not have the group.

        `task` is the group's dataset task, if the caller knows it.
        """
        group = self.group(group_id)
        if group is None:
            return []
        find_request = partial(self.answered_request, app_key=group.app_key)
        messages = recorded_user_texts(group.route, group.request_json, find_request)
        return [group.question, (task or self._recorded.task_of(group)).main_query, *messages]

    def task(self, task_id: str, rows: Mapping[str, Task] | None = None) -> Task | None:
        """Return the task with this id, or None. `rows` are the rows of a dataset file, by id."""
        return self._recorded.task(task_id, rows)

    def recorded(self, group: GroupRecord, task: Task | None = None) -> RecordedGroup:
        """Return a group in the form in which the reward hook gets groups."""
        return self._recorded.recorded(group, task)

    def chat_request(self, group: GroupRecord) -> dict[str, Any] | None:
        """Return the request of a group in the format of chat completions, including the earlier
        conversation. Return None for a text completion, and if the request cannot be
        translated."""
        find_request = partial(self.answered_request, app_key=group.app_key)
        return recorded_chat(group.route, group.request_json, find_request)

    def _transact(self, batch: Sequence[_Change]) -> bool:
        """Write a batch of changes in one transaction, and return True if any row changed.

        Consecutive group records in the batch are written together, because this is much faster
        than writing them one by one.
        """
        db = self._write_db
        # Redacted before the transaction, in which other processes cannot write.
        redacted = [
            self._redactor.group(change) if isinstance(change, GroupRecord) else change
            for change in batch
        ]
        with content_store(db).transaction(), db.begin(), counted(db):
            before = dbapi_connection(db).total_changes
            for are_records, run in itertools.groupby(redacted, _is_record):
                if are_records:
                    row_changes.put_groups(db, cast(Iterable[GroupRecord], run))
                else:
                    for change in cast(Iterable[Callable[[Connection], None]], run):
                        change(db)
            return dbapi_connection(db).total_changes > before


def _is_record(change: _Change) -> bool:
    return isinstance(change, GroupRecord)


def _write_engine(path: Path, busy_timeout_s: float) -> Engine:
    engine = _engine(path, busy_timeout_s, keeps_connections=True)

    def begin(db: Connection) -> None:
        # Takes the write lock before reading, so that a cursor is not stale when it is written.
        db.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "begin", begin)
    return engine


def _engine(path: Path, busy_timeout_s: float, *, keeps_connections: bool = False) -> Engine:
    url = URL.create("sqlite", database=str(path))
    engine = create_engine(url, poolclass=QueuePool if keeps_connections else NullPool)

    def connect(connection: Any, _: object) -> None:
        # sqlite3 then begins no transaction by itself, so DDL is inside SQLAlchemy's.
        connection.isolation_level = None
        for pragma in (
            f"busy_timeout = {int(busy_timeout_s * 1000)}",
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "foreign_keys = ON",
            SECURE_DELETE,
        ):
            connection.execute(f"PRAGMA {pragma}").close()

    event.listen(engine, "connect", connect)
    return engine
