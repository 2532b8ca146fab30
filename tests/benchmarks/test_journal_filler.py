"""A journal that benchmarks.swarm_load fills can be used by a server."""

import time
from pathlib import Path

from sqlalchemy import Connection

from benchmarks.swarm_parts import journal_filler
from fakevllm_server.journal import reads
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.log import RunLog


def test_a_server_can_continue_from_a_filled_journal(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    journal_filler.fill(run_dir, 3 * journal_filler.ROWS_PER_STEP)
    assert journal_filler.num_rows(run_dir) == 3 * journal_filler.ROWS_PER_STEP
    journal = Journal(run_dir / "journal.sqlite")
    with journal.opening():
        assert journal.read(reads.pending_work, 0.0) == reads.PendingWork()
        log = RunLog(journal)
        (saved,) = journal.read(reads.checkpoints)
        submission = journal.read(reads.submission, f"episode:{_last_ended_episode(journal)}")
    assert (log.last_step, log.version, saved.step) == (3, 3, 3)
    assert CheckpointFolders(run_dir / "checkpoints").find(saved).is_dir()
    assert submission is not None and submission.reply_json == '{"success":true}'
    assert [len(entry.groups) for entry in log.entries_after(0)] == [journal_filler.BATCH_SIZE] * 3
    assert journal.read(_newest_submission) < time.time() - 3600
    journal.close()


def _last_ended_episode(journal: Journal) -> str:
    query = "SELECT owner FROM samples ORDER BY rowid DESC LIMIT 1"
    return journal.read(lambda db: db.exec_driver_sql(query).scalar_one())


def _newest_submission(db: Connection) -> float:
    return db.exec_driver_sql("SELECT MAX(at) FROM submissions").scalar_one()
