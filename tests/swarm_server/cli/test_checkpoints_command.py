"""`fakevllm-server checkpoints`, over runs that a whole server made with the fake engine. What is
exported of a real model: tests/swarm_server/backends/embedded/test_export_command.py."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_server.cli.saved_runs import GROUPS, ask, contents, life, listed, opened, saved

from fakevllm_server.cli import checkpoints
from fakevllm_server.cli.run_archive import Integrity, RunArchive
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.training.checkpointing import best_checkpoint

# --- list


def test_the_list_says_what_is_saved_and_how_good_it_was(run_dir: Path) -> None:
    assert [
        (row["step"], row["version"], row["reward_mean"], row["is_best"], row["is_newest"])
        for row in listed(run_dir)
    ] == [(2, 2, 0.75, True, False), (4, 4, 0.5, False, False), (5, 5, 0.5, False, True)]
    assert all(row["is_published"] for row in listed(run_dir))
    shown = ask(run_dir, "list").stdout
    assert "stands at step 5" in shown
    assert "0.750" in shown and "best" in shown and "newest" in shown


async def test_the_list_is_shown_while_a_server_runs(tmp_path: Path) -> None:
    async with life(tmp_path) as one:
        assert "has no checkpoint yet" in ask(tmp_path, "list").stdout
        for name in GROUPS[:2]:
            await one.train(name)
        assert [row["step"] for row in await asyncio.to_thread(listed, tmp_path)] == [2]


def test_weights_that_were_saved_and_never_served_are_told(run_dir: Path) -> None:
    with opened(run_dir) as db:
        db.execute("DELETE FROM publications WHERE version = 5")
    assert [row["is_published"] for row in listed(run_dir)] == [True, True, False]


def test_looking_leaves_the_run_as_it_is(run_dir: Path) -> None:
    before = contents(run_dir)
    for command in ("list", "verify"):
        assert ask(run_dir, command).exit_code == 0
    assert contents(run_dir) == before


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([-2.0, -1.0, None], 2), ([None, -1.0], 2), ([0.5, 0.5], 2), ([None, None], 2)],
)
def test_the_best_is_of_the_highest_reward_and_never_of_none(
    rewards: list[float | None], expected: int
) -> None:
    known = [
        SavedCheckpoint(step, "", step, "", mean) for step, mean in enumerate(rewards, start=1)
    ]
    found = best_checkpoint(known)
    assert found is not None and found.step == expected


# --- verify


def test_what_was_written_is_whole(run_dir: Path) -> None:
    result = ask(run_dir, "verify")
    assert result.exit_code == 0
    assert result.stdout.count("  whole\n") == 3


def test_what_is_damaged_or_missing_is_named(run_dir: Path) -> None:
    (saved(run_dir, 2) / "theta.json").write_text("{}")
    shutil.rmtree(saved(run_dir, 4))
    result = ask(run_dir, "verify")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "step-00000002  damaged (its files are not those that were written)",
        "step-00000004  missing",
        "step-00000005  whole",
    ]
    assert ask(run_dir, "verify", "5").exit_code == 0
    assert ask(run_dir, "verify", "4").exit_code == 1
    assert "missing" in ask(run_dir, "list").stdout


def test_a_folder_that_is_no_checkpoint_is_named_and_is_no_damage(run_dir: Path) -> None:
    for name in ("step-00000003", "step-00000006.tmp"):
        (run_dir / "checkpoints" / name).mkdir()
    result = ask(run_dir, "verify")
    assert result.exit_code == 0
    for name in ("step-00000003", "step-00000006.tmp"):
        assert f"{name}  {checkpoints.STRANGER}" in result.stdout


def test_what_a_server_takes_away_meanwhile_is_no_damage(run_dir: Path) -> None:
    run = RunArchive(run_dir)
    first = run.checkpoint(2)
    with opened(run_dir) as db:
        db.execute("DELETE FROM checkpoints WHERE step = 2")
    shutil.rmtree(saved(run_dir, 2))
    assert run.verify(first).verdict is Integrity.REPLACED


def test_reading_tells_how_far_it_is(run_dir: Path) -> None:
    run, read = RunArchive(run_dir), list[int]()
    run.verify(run.checkpoint(2), read.append)
    assert sum(read) == run.num_bytes(run.checkpoint(2))


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("verify", "3"), "has no checkpoint of step 3: there are those of steps 2, 4, 5."),
        (("restore", "3", "--yes"), "has no checkpoint of step 3"),
        (("export", "2"), "takes STEP FOLDER, or --best FOLDER"),
        (("export", "two", "out"), "takes STEP FOLDER, or --best FOLDER"),
        (("export", "2", "out", "--best"), "takes STEP FOLDER, or --best FOLDER"),
        (("export", "2", "."), "is no empty folder: name another"),
        (("export", "2", "{run_dir}/new"), "is the fake engine's: there is no model to export"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    run_dir: Path, arguments: tuple[str, ...], told: str
) -> None:
    result = ask(run_dir, *[one.format(run_dir=run_dir) for one in arguments])
    assert result.exit_code == 2
    assert told in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["list"], ["verify"], ["restore", "2"], ["export", "2", "x"]])
def test_a_folder_without_a_run_is_told_and_left_alone(tmp_path: Path, command: list[str]) -> None:
    result = ask(tmp_path / "nothing", *command)
    assert result.exit_code == 2
    assert "holds no run: name a server's with --run-dir" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_is_none_is_one_line(run_dir: Path) -> None:
    (run_dir / "journal.sqlite").write_bytes(b"no database" * 1000)
    result = ask(run_dir, "list")
    assert result.exit_code == 2
    assert "cannot be read (file is not a database)" in result.stderr


def test_the_help_loads_nothing_heavy() -> None:
    script = (
        "import sys; from typer.testing import CliRunner\n"
        "from fakevllm_server.cli.main import app\n"
        "assert CliRunner().invoke(app, ['checkpoints', 'export', '--help']).exit_code == 0\n"
        "heavy = {'torch', 'rich.table', 'sqlalchemy', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
