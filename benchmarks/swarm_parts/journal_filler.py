"""Write a large journal with the server's own code, many changes in one transaction.

The journal's episodes were claimed, called, ended and trained two hours ago.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path

from sqlalchemy import Connection

from fakevllm_adapters.protocol.keys import new_episode_key, new_id
from fakevllm_adapters.protocol.swarm import (
    EndEpisodeRequest,
    LogEntry,
    TrainedGroup,
    WorkflowOutput,
)
from fakevllm_server.episodes.episode_registry import Episode
from fakevllm_server.episodes.submissions import hash_of
from fakevllm_server.journal import row_changes
from fakevllm_server.journal.group_commit_writer import Change
from fakevllm_server.journal.rows import PooledGroup, SavedCheckpoint, ScoredSample, Submission
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.tables import GroupState
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.types.calls import RecordedCall, VersionSpan

NUM_REPEAT = 4
BATCH_SIZE = 20
TABLES = ("episodes", "calls", "samples", "groups", "submissions")
ROWS_PER_STEP = BATCH_SIZE * (1 + 3 * NUM_REPEAT)
"""Number of rows that one step leaves in TABLES after its calls are deleted."""
STEPS_AT_ONCE = 20
"""Number of steps that are queued before the script waits for the writer."""
AGE_S = 7200.0
CALL = RecordedCall(
    prompt_ids=list(range(20)),
    response_ids=[1, 2, 3, 4],
    logprobs=[-1.5, -0.5, -0.25, -2.0],
    versions=[VersionSpan(0, 0, 4)],
    temperature=1.0,
    finish_reason="stop",
    untrainable=None,
)


def fill(run_dir: Path, num_rows: int) -> None:
    """Write the journal and the checkpoint of a run with the fake engine, with about `num_rows`
    rows.

    A server can be started on `run_dir` afterwards.
    """
    run_dir.mkdir(parents=True)
    journal = Journal(run_dir / "journal.sqlite")
    num_steps = max(1, round(num_rows / ROWS_PER_STEP))
    for step in range(1, num_steps + 1):
        saved = _write_checkpoint(run_dir, step) if step == num_steps else None
        journal.put(*_step_changes(step, saved))
        if step % STEPS_AT_ONCE == 0:
            assert journal.drain()
    journal.put(Change("age", _make_older))
    assert journal.drain()
    journal.close()


def num_rows(run_dir: Path) -> int:
    """Return the number of rows in the journal."""

    def count(db: Connection) -> int:
        counts = " + ".join(f"(SELECT COUNT(*) FROM {table})" for table in TABLES)
        return db.exec_driver_sql(f"SELECT {counts}").scalar_one()

    journal = Journal(run_dir / "journal.sqlite")
    try:
        return journal.read(count)
    finally:
        journal.close()


def _step_changes(step: int, saved: SavedCheckpoint | None) -> Generator[Change]:
    group_ids: list[str] = []
    for _ in range(BATCH_SIZE):
        group_ids.append((yield from _group_changes()))
    yield row_changes.planned(step, step - 1, group_ids)
    groups = [TrainedGroup(group_id=name, siblings=list(range(NUM_REPEAT))) for name in group_ids]
    metrics = {f"metric {number}": float(number) for number in range(40)}
    entry = LogEntry(seq=step, kind="step", step=step, version=step, groups=groups, metrics=metrics)
    yield row_changes.trained(entry, saved)
    yield row_changes.published(step, step)
    yield row_changes.pruned([], step)


def _group_changes() -> Generator[Change, None, str]:
    task_id = f"task {new_id()}"
    samples: list[ScoredSample] = []
    group_id = ""
    for index in range(NUM_REPEAT):
        key = new_episode_key(1)
        episode = Episode(new_id()[:28], 1, key, "a client", "train", 240.0, 0.0)
        sample = ScoredSample(episode.uuid, index, float(index), task_id)
        samples.append(sample)
        yield row_changes.claimed(episode)
        yield row_changes.call_recorded(episode.uuid, 0, CALL)
        end = EndEpisodeRequest(
            client_uuid="a client",
            episode_uuid=episode.uuid,
            task_id=task_id,
            workflow_output=WorkflowOutput(reward=float(index), metadata={"task_id": task_id}),
        )
        submission = Submission(f"episode:{episode.uuid}", hash_of(end), '{"success":true}')
        group_id = f"task:{task_id}#{episode.uuid}"
        is_last = index == NUM_REPEAT - 1
        group = PooledGroup(group_id, GroupState.POOLED) if is_last else None
        members = samples if is_last else []
        yield row_changes.episode_ended(episode.episode_id, sample, group, members, submission)
    return group_id


def _write_checkpoint(run_dir: Path, step: int) -> SavedCheckpoint:
    async def save(folder: Path) -> None:
        (folder / "theta.json").write_text('{"theta": 0.0}')

    folder, digest = asyncio.run(CheckpointFolders(run_dir / "checkpoints").write(step, save))
    return SavedCheckpoint(step, folder, step, digest, None)


def _make_older(db: Connection) -> None:
    """Date all submissions back by AGE_S seconds."""
    db.exec_driver_sql("UPDATE submissions SET at = at - ?", (AGE_S,))
