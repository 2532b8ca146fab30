"""What benchmarks.swarm_load measures on: a journal as a server would have written it."""

import time
from pathlib import Path

from sqlalchemy import Connection

from benchmarks import swarm_rows
from fakevllm_server.journal import reads
from fakevllm_server.journal.store import Journal
from fakevllm_server.run.checkpoints import CheckpointFolders
from fakevllm_server.run.log import RunLog


def test_a_server_goes_on_from_rows_that_were_made(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    swarm_rows.fill(run_dir, 3 * swarm_rows.ROWS_PER_STEP)
    assert swarm_rows.num_rows(run_dir) == 3 * swarm_rows.ROWS_PER_STEP
    journal = Journal(run_dir / "journal.sqlite")
    with journal.opening():
        assert journal.read(reads.pending_work, 0.0) == reads.PendingWork()
        log = RunLog(journal)
        (saved,) = journal.read(reads.checkpoints)
        told = journal.read(reads.submission, f"episode:{_an_ended_claim(journal)}")
    assert (log.last_step, log.version, saved.step) == (3, 3, 3)
    assert CheckpointFolders(run_dir / "checkpoints").find(saved).is_dir()
    assert told is not None and told.reply_json == '{"success":true}'
    assert [len(entry.groups) for entry in log.entries_after(0)] == [swarm_rows.BATCH_SIZE] * 3
    assert journal.read(_newest_reply) < time.time() - 3600
    journal.close()


def _an_ended_claim(journal: Journal) -> str:
    query = "SELECT owner FROM samples ORDER BY rowid DESC LIMIT 1"
    return journal.read(lambda db: db.exec_driver_sql(query).scalar_one())


def _newest_reply(db: Connection) -> float:
    return db.exec_driver_sql("SELECT MAX(at) FROM submissions").scalar_one()
