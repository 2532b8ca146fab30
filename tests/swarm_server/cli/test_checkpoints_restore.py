"""`fakevllm-server checkpoints restore`: the next start goes on from there, and what was trained
since is given up for good."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_server.cli.saved_runs import GROUPS, JOB, ask, life, listed, opened, saved, theta

from fakevllm_server.journal import reads
from fakevllm_server.journal.rows import PRUNED
from fakevllm_server.run.folder import RunFolder
from fakevllm_server.types.crash_points import EXIT_CODE


async def test_the_next_start_goes_on_from_the_restored_step(run_dir: Path) -> None:
    given_up = theta(run_dir, 4)
    result = await asyncio.to_thread(ask, run_dir, "restore", "2", "--yes")
    assert result.exit_code == 0, result.output
    assert "up to step 5" in result.stdout and "3 groups" in result.stdout
    assert [row["step"] for row in listed(run_dir)] == [2]
    assert not saved(run_dir, 4).exists() and not saved(run_dir, 5).exists()

    async with life(run_dir) as one:
        assert (one.state.runlog.last_step, one.state.engine.global_step) == (2, 3)
        assert one.state.engine.version > 5
        told = [entry for entry in one.state.runlog.entries_after(0) if entry.kind == "restored"]
        assert [(entry.step, entry.lost) for entry in told] == [(2, ["c", "d", "e"]), (2, [])]
        await one.end_group("c")  # sent again: answered as before, and to no effect
        assert one.state.pool.num_finished == 0
        for name in ("f", "g"):
            await one.train(name)
        assert one.state.engine.version > 7
        versions = [entry.version for entry in one.state.runlog.entries_after(0) if entry.version]
        assert versions == sorted(versions)
    # The same step on the same weights: those of step 2.
    assert theta(run_dir, 4) == given_up
    assert states(run_dir) == {
        **dict.fromkeys("abfg", "consumed"),
        **dict.fromkeys("cde", "dropped"),
    }


async def test_a_crash_before_the_folders_are_removed_is_harmless(run_dir: Path) -> None:
    command = ["checkpoints", "restore", "2", "--yes", "--run-dir", str(run_dir)]
    crashed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "fakevllm_server", *command],
        env=os.environ | {"CRASH_AT": "abandon.after_commit"},
        check=False,
    )
    assert crashed.returncode == EXIT_CODE
    assert saved(run_dir, 5).exists() and [row["step"] for row in listed(run_dir)] == [2]
    async with life(run_dir) as one:
        assert one.state.engine.global_step == 3
        assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000002"]


async def test_a_crash_before_the_journal_has_it_changes_nothing(run_dir: Path) -> None:
    command = ["checkpoints", "restore", "2", "--yes", "--run-dir", str(run_dir)]
    crashed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "fakevllm_server", *command],
        env=os.environ | {"CRASH_AT": "abandon.before_commit"},
        check=False,
    )
    assert crashed.returncode == EXIT_CODE
    async with life(run_dir) as one:
        assert one.state.engine.global_step == 6


async def test_a_run_restored_to_before_what_is_pruned_can_train_again_what_it_trains(
    run_dir: Path,
) -> None:
    """A crash after a new step goes back to the old checkpoint, and no group is lost."""
    with opened(run_dir) as db:
        db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (PRUNED, "4"))
    assert (await asyncio.to_thread(ask, run_dir, "restore", "2", "--yes")).exit_code == 0
    async with life(run_dir, JOB.model_copy(update={"save_freq": 100})) as one:
        await one.train("f")
        crashed = run_dir.parent / "crashed"  # as it lies on the disk at this moment
        shutil.copytree(run_dir, crashed, ignore=shutil.ignore_patterns("*.sock"))
    async with life(crashed) as one:
        await one.until(lambda: one.state.runlog.last_step == 3)
        lost = [
            entry.lost for entry in one.state.runlog.entries_after(0) if entry.kind == "restored"
        ]
        assert lost == [["c", "d", "e"], [], []]
        assert one.state.journal.read(reads.ended_reason, "f") == "already_trained"


async def test_a_run_that_a_server_uses_is_not_changed(tmp_path: Path) -> None:
    async with life(tmp_path) as one:
        for name in GROUPS[:4]:
            await one.train(name)
        result = await asyncio.to_thread(ask, tmp_path, "restore", "2", "--yes")
    assert result.exit_code == 2
    assert "uses" in result.stderr and "stop it, then restore" in result.stderr
    assert result.stderr.count("\n") == 1
    assert [row["step"] for row in listed(tmp_path)] == [2, 4]


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [("n\n", 1, "Nothing is changed."), ("", 2, "give --yes"), ("y\n", 0, "goes on from step 4")],
)
def test_nothing_is_given_up_unless_the_user_agrees(
    run_dir: Path, answer: str, code: int, told: str
) -> None:
    result = ask(run_dir, "restore", "4", answer=answer)
    assert result.exit_code == code
    assert told in result.output
    assert len(listed(run_dir)) == (2 if code == 0 else 3)


def test_a_damaged_checkpoint_is_not_gone_back_to(run_dir: Path) -> None:
    (saved(run_dir, 2) / "theta.json").write_text("{}")
    result = ask(run_dir, "restore", "2", "--yes")
    assert result.exit_code == 2
    assert "is damaged" in result.stderr and "take another step" in result.stderr
    assert len(listed(run_dir)) == 3
    RunFolder(run_dir).close()  # let go of


def test_where_a_run_stands_there_is_nothing_to_restore(run_dir: Path) -> None:
    result = ask(run_dir, "restore", "5")
    assert (result.exit_code, len(listed(run_dir))) == (0, 3)
    assert "stands at step 5 already" in result.stdout


def states(run_dir: Path) -> dict[str, str]:
    with opened(run_dir) as db:
        return dict(db.execute("SELECT group_id, state FROM groups ORDER BY group_id").fetchall())
