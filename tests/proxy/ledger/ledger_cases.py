"""Groups and log entries for the ledger's tests, and helpers that read their rows."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from fakevllm.ledger.records import GroupRecord, SiblingRecord
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.packed_numbers import pack_floats, pack_ids
from fakevllm_adapters.protocol.swarm import CapturedCall, LogEntry, TrainedGroup


def sibling(index: int, reward: float | None = None, *, served: bool = False) -> SiblingRecord:
    return SiblingRecord(
        index=index,
        served=served,
        best=served,
        status=200,
        message_json=f'{{"role":"assistant","content":"answer {index}"}}',
        text=f"answer {index}",
        finish_reason="stop",
        prompt_tokens=5,
        completion_tokens=3,
        reward=reward,
    )


def group(
    group_id: str = "g1",
    rewards: Sequence[float | None] = (0.0, 1.0),
    *,
    served: int = 0,
    state: str = "scored",
    step: int | None = None,
    received_at: float = 1000.0,
    task_id: str | None = None,
) -> GroupRecord:
    rows = [sibling(index, reward, served=index == served) for index, reward in enumerate(rewards)]
    return GroupRecord(
        group_id=group_id,
        received_at=received_at,
        route="/v1/chat/completions",
        model="m",
        streamed=True,
        task_id=task_id,
        app_key="0a1b2c3d",
        request_json='{"messages":[]}',
        question="1+1?",
        num_siblings=len(rows),
        status=200,
        latency_s=0.25,
        served_index=served,
        best_index=served,
        state=state,
        reason=None,
        hook_hash="9f86d081884c7d65",
        siblings=rows,
        step=step,
    )


def call(
    *,
    version: int = 3,
    logprobs: Sequence[float] | None = (-0.5, -0.25),
    replica: str | None = None,
) -> CapturedCall:
    return CapturedCall(
        prompt_ids=pack_ids([1, 2, 300]),
        response_ids=pack_ids([70000, 5]),
        logprobs=None if logprobs is None else pack_floats(logprobs),
        weight_versions=[[version, 0, 1], [version + 1, 1, 2]],
        temperature=1.0,
        finish_reason="stop",
        replica=replica,
    )


def trained(
    seq: int,
    *group_ids: str,
    step: int = 1,
    siblings: Sequence[int] = (0, 1),
    advantages: Sequence[float] = (),
) -> LogEntry:
    groups = [
        TrainedGroup(group_id=one, siblings=list(siblings), advantages=list(advantages))
        for one in group_ids
    ]
    return LogEntry(seq=seq, kind="step", step=step, version=step, groups=groups)


def dropped(seq: int, **reasons: str) -> LogEntry:
    return LogEntry(seq=seq, kind="dropped", reasons=reasons)


def restored(seq: int, *group_ids: str) -> LogEntry:
    return LogEntry(seq=seq, kind="restored", lost=list(group_ids))


def rows(path: Path, query: str) -> list[tuple[object, ...]]:
    """Return the rows that another process reads from the file."""
    other = sqlite3.connect(path)
    try:
        return other.execute(query).fetchall()
    finally:
        other.close()


def state(ledger: Ledger, group_id: str = "g1") -> tuple[str, str | None]:
    assert ledger.drain()
    found = ledger.group(group_id)
    assert found is not None
    return found.state, found.reason


def marks(ledger: Ledger, group_id: str = "g1") -> list[bool]:
    assert ledger.drain()
    found = ledger.group(group_id)
    assert found is not None
    return [one.trained for one in found.siblings]


def drop_replicas(db: sqlite3.Connection) -> None:
    """Change a ledger to the schema before the column `replica`."""
    ((view,),) = db.execute("SELECT sql FROM sqlite_master WHERE name = 'calls'").fetchall()
    db.execute("DROP VIEW calls")
    db.execute("ALTER TABLE call_rows DROP COLUMN replica")
    db.execute(view.replace(", replica", ""))
    db.execute("DELETE FROM migrations WHERE name = 'm020_replica'")


def make_older(path: Path) -> None:
    """Change a ledger to the schema before the tables `rescored` and `forgotten_groups`."""
    with closing(sqlite3.connect(path)) as db, db:
        newer = ("rescored", "forgotten_groups", "loose_pieces", "step_tokens", "trained_versions")
        for table in newer:
            db.execute(f"DROP TABLE {table}")
        for index in ("ix_calls_response_piece", "ix_feedback_edit"):
            db.execute(f"DROP INDEX {index}")
        for column in ("edit_state", "edit_reason", "edit_step", "edit_version"):
            db.execute(f"ALTER TABLE feedback DROP COLUMN {column}")
        drop_replicas(db)
        db.execute("DELETE FROM counters WHERE subject = 'tokens' AND name <> 'sampled'")
        db.execute("DELETE FROM migrations WHERE name >= 'm016'")
