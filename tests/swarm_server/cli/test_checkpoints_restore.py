"""`fakevllm-server checkpoints restore`: the next start continues from the checkpoint.

All later training is discarded.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_server.cli.saved_runs import (
    GROUPS,
    JOB,
    checkpoint_folder,
    list_json,
    open_journal,
    run_command,
    running_server,
    theta,
)

from fakevllm_server.journal import reads
from fakevllm_server.journal.rows import PRUNED
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.types.crash_points import EXIT_CODE


async def test_the_next_start_continues_from_the_restored_step(run_dir: Path) -> None:
    discarded = theta(run_dir, 4)
    result = await asyncio.to_thread(run_command, run_dir, "restore", "2", "--yes")
    assert result.exit_code == 0, result.output
    assert "up to step 5" in result.stdout and "3 groups" in result.stdout
    assert [row["step"] for row in list_json(run_dir)] == [2]
    assert not checkpoint_folder(run_dir, 4).exists() and not checkpoint_folder(run_dir, 5).exists()

    async with running_server(run_dir) as server:
        assert (server.state.runlog.last_step, server.state.engine.global_step) == (2, 3)
        assert server.state.engine.version > 5
        restored = [
            entry for entry in server.state.runlog.entries_after(0) if entry.kind == "restored"
        ]
        assert [(entry.step, entry.lost) for entry in restored] == [(2, ["c", "d", "e"]), (2, [])]
        await server.end_group("c")  # sent again: gets the same reply and has no effect
        assert server.state.pool.num_finished == 0
        for name in ("f", "g"):
            await server.train(name)
        assert server.state.engine.version > 7
        versions = [
            entry.version for entry in server.state.runlog.entries_after(0) if entry.version
        ]
        assert versions == sorted(versions)
    # Step 4 was trained again from the weights of step 2.
    assert theta(run_dir, 4) == discarded
    assert states(run_dir) == {
        **dict.fromkeys("abfg", "consumed"),
        **dict.fromkeys("cde", "dropped"),
    }


async def test_a_crash_before_the_folders_are_deleted_is_harmless(run_dir: Path) -> None:
    command = ["checkpoints", "restore", "2", "--yes", "--run-dir", str(run_dir)]
    crashed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "fakevllm_server", *command],
        env=os.environ | {"CRASH_AT": "abandon.after_commit"},
        check=False,
    )
    assert crashed.returncode == EXIT_CODE
    assert checkpoint_folder(run_dir, 5).exists() and [
        row["step"] for row in list_json(run_dir)
    ] == [2]
    async with running_server(run_dir) as server:
        assert server.state.engine.global_step == 3
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000002"]


async def test_a_crash_before_the_journal_is_written_changes_nothing(run_dir: Path) -> None:
    command = ["checkpoints", "restore", "2", "--yes", "--run-dir", str(run_dir)]
    crashed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "fakevllm_server", *command],
        env=os.environ | {"CRASH_AT": "abandon.before_commit"},
        check=False,
    )
    assert crashed.returncode == EXIT_CODE
    async with running_server(run_dir) as server:
        assert server.state.engine.global_step == 6


async def test_a_run_restored_to_before_its_pruned_steps_loses_no_new_group_in_a_crash(
    run_dir: Path,
) -> None:
    """After the crash, the new step is trained again from the old checkpoint."""
    with open_journal(run_dir) as db:
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (PRUNED, "4"))
    assert (await asyncio.to_thread(run_command, run_dir, "restore", "2", "--yes")).exit_code == 0
    async with running_server(run_dir, JOB.model_copy(update={"save_freq": 100})) as server:
        await server.train("f")
        crashed = run_dir.parent / "crashed"  # a copy of the disk at this moment
        shutil.copytree(run_dir, crashed, ignore=shutil.ignore_patterns("*.sock"))
    async with running_server(crashed) as server:
        await server.until(lambda: server.state.runlog.last_step == 3)
        lost = [
            entry.lost for entry in server.state.runlog.entries_after(0) if entry.kind == "restored"
        ]
        assert lost == [["c", "d", "e"], [], []]
        assert server.state.journal.read(reads.ended_reason, "f") == "already_trained"


async def test_a_run_that_a_server_uses_is_refused(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        for name in GROUPS[:4]:
            await server.train(name)
        result = await asyncio.to_thread(run_command, tmp_path, "restore", "2", "--yes")
    assert result.exit_code == 2
    assert "uses" in result.stderr and "stop it, then restore" in result.stderr
    assert result.stderr.count("\n") == 1
    assert [row["step"] for row in list_json(tmp_path)] == [2, 4]


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        ("n\n", 1, "Nothing was changed."),
        ("", 2, "give --yes"),
        ("y\n", 0, "continues from step 4"),
    ],
)
def test_nothing_is_discarded_without_confirmation(
    run_dir: Path, answer: str, code: int, message: str
) -> None:
    result = run_command(run_dir, "restore", "4", answer=answer)
    assert result.exit_code == code
    assert message in result.output
    assert len(list_json(run_dir)) == (2 if code == 0 else 3)


def test_a_damaged_checkpoint_is_not_restored(run_dir: Path) -> None:
    (checkpoint_folder(run_dir, 2) / "theta.json").write_text("{}")
    result = run_command(run_dir, "restore", "2", "--yes")
    assert result.exit_code == 2
    assert "is damaged" in result.stderr and "choose another step" in result.stderr
    assert len(list_json(run_dir)) == 3
    RunFolder(run_dir).close()  # the lock was released


def test_restoring_the_current_step_changes_nothing(run_dir: Path) -> None:
    result = run_command(run_dir, "restore", "5")
    assert (result.exit_code, len(list_json(run_dir))) == (0, 3)
    assert "is at step 5 already" in result.stdout


def states(run_dir: Path) -> dict[str, str]:
    with open_journal(run_dir) as db:
        return dict(db.execute("SELECT group_id, state FROM groups ORDER BY group_id").fetchall())


def test_the_checkpoint_of_the_released_version_is_kept_beside_those_of_the_run(
    run_dir: Path,
) -> None:
    with open_journal(run_dir) as db:
        db.execute(
            "INSERT INTO releases (id, request_hash, decision, version, newest, is_rollback, "
            "pinned_json, at, decided_by, evidence_json) "
            "VALUES ('1', x'', 'released', 4, 5, 0, '[]', 0, 'gate', '{}')"
        )
        (folder,) = db.execute("SELECT folder FROM checkpoints WHERE version = 4").fetchone()
    shown = run_command(run_dir, "restore", "2", answer="y").stdout
    assert "Version 4 is released and answers apps: its checkpoint is kept" in shown
    with open_journal(run_dir) as db:
        assert db.execute("SELECT version, folder FROM side_checkpoints").fetchall() == [
            (4, folder)
        ]
        assert db.execute("SELECT max(step) FROM checkpoints").fetchone() == (2,)
    assert (run_dir / "checkpoints" / folder).is_dir()
