"""`fakevllm-server checkpoints` with runs of a real server and the fake engine. For the export of
a real model, see tests/swarm_server/backends/embedded/test_export_command.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from swarm_server.cli.saved_runs import (
    GROUPS,
    checkpoint_folder,
    contents,
    list_json,
    open_journal,
    run_command,
    running_server,
)

from fakevllm_adapters.protocol.releases import Decision, ReleaseRequest
from fakevllm_server.cli import checkpoints
from fakevllm_server.cli.run_archive import Integrity, RunArchive
from fakevllm_server.journal.rows import SavedCheckpoint
from fakevllm_server.training.checkpointing import best_before_change, best_checkpoint

# --- list


def test_the_list_has_each_checkpoint_with_its_mean_reward(run_dir: Path) -> None:
    assert [
        (row["step"], row["version"], row["reward_mean"], row["is_best"], row["is_newest"])
        for row in list_json(run_dir)
    ] == [(2, 2, 0.75, True, False), (4, 4, 0.5, False, False), (5, 5, 0.5, False, True)]
    assert all(row["is_published"] for row in list_json(run_dir))
    shown = run_command(run_dir, "list").stdout
    assert "is at step 5" in shown
    assert "0.750" in shown and "best" in shown and "newest" in shown


async def test_the_list_works_while_a_server_runs(tmp_path: Path) -> None:
    async with running_server(tmp_path) as server:
        assert "has no checkpoint yet" in run_command(tmp_path, "list").stdout
        for name in GROUPS[:2]:
            await server.train(name)
        assert [row["step"] for row in await asyncio.to_thread(list_json, tmp_path)] == [2]


async def test_the_list_marks_the_released_version_and_names_the_one_that_was_left(
    tmp_path: Path,
) -> None:
    async with running_server(tmp_path) as server:
        for name in GROUPS[:4]:
            await server.train(name)
        decide = server.state.release_service.decide
        for number, decision in enumerate((Decision.RELEASED, Decision.REJECTED), start=1):
            version = 2 * number
            request = ReleaseRequest(id=str(number), decision=decision, version=version)
            assert (await decide(request, "")).success
        await server.until(lambda: server.state.runlog.last_step == 2)
        await server.train("again")
        candidate = ReleaseRequest(id="3", decision=Decision.CANDIDATE)
        assert (await decide(candidate, "")).success
        rows = await asyncio.to_thread(list_json, tmp_path)
        shown = (await asyncio.to_thread(run_command, tmp_path, "list")).stdout
        verified = (await asyncio.to_thread(run_command, tmp_path, "verify")).stdout
    marks = [(row["version"], row["is_released"], row["is_candidate"]) for row in rows]
    assert marks == [(2, True, False), (6, False, True)]
    assert "released" in shown and "candidate" in shown
    assert "step-00000004 is of version 4, which training has left" in shown
    assert "step-00000004" not in verified


def test_the_list_works_with_the_journal_of_a_server_without_releases(run_dir: Path) -> None:
    with open_journal(run_dir) as db:
        db.execute("DROP TABLE releases")
        db.execute("DROP TABLE side_checkpoints")
    assert [row["is_released"] for row in list_json(run_dir)] == [False, False, False]
    assert run_command(run_dir, "verify").exit_code == 0


def test_a_checkpoint_that_was_never_served_is_not_published(run_dir: Path) -> None:
    with open_journal(run_dir) as db:
        db.execute("DELETE FROM publications WHERE version = 5")
    assert [row["is_published"] for row in list_json(run_dir)] == [True, True, False]


def test_list_and_verify_change_nothing(run_dir: Path) -> None:
    before = contents(run_dir)
    for command in ("list", "verify"):
        assert run_command(run_dir, command).exit_code == 0
    assert contents(run_dir) == before


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([-2.0, -1.0, None], 2), ([None, -1.0], 2), ([0.5, 0.5], 2), ([None, None], 2)],
)
def test_the_best_checkpoint_has_the_highest_reward(
    rewards: list[float | None], expected: int
) -> None:
    known = [
        SavedCheckpoint(step, "", step, "", mean) for step, mean in enumerate(rewards, start=1)
    ]
    best = best_checkpoint(known)
    assert best is not None and best.step == expected


def test_the_best_checkpoint_is_chosen_among_those_since_the_last_change() -> None:
    rewards = [0.9, 0.5, 0.2, 3.0, 2.0]
    known = [
        SavedCheckpoint(step, "", step, "", mean) for step, mean in enumerate(rewards, start=1)
    ]

    def best(changes: list[int], newest: int = 5) -> tuple[int | None, int | None]:
        saved = known[:newest]
        one, before = best_checkpoint(saved, changes), best_before_change(saved, changes)
        return one and one.step, before and before.step

    assert best([]) == (4, None)
    assert best([4]) == (4, 1)
    assert best([2, 5]) == (5, 4)
    assert best([2, 3, 5]) == (5, 4)
    assert best([4], newest=3) == (1, None)  # no checkpoint since the change
    assert best_checkpoint([], [4]) is None


def test_the_list_says_that_the_best_checkpoint_is_chosen_since_a_change(run_dir: Path) -> None:
    assert "changed" not in run_command(run_dir, "list").stdout
    with contextlib.closing(sqlite3.connect(run_dir / "journal.sqlite")) as db, db:
        db.execute(
            "UPDATE entries SET entry_json = json_set(entry_json, '$.changed', 'the hooks changed')"
            " WHERE kind = 'step' AND step = 5"
        )
    shown = " ".join(run_command(run_dir, "list").stdout.split())
    assert "At step 5 the hooks changed. The best checkpoint is chosen among the later" in shown
    rows = json.loads(run_command(run_dir, "list", "--json").stdout)
    assert [row["step"] for row in rows if row["is_best"]] == [5]


# --- verify


def test_undamaged_checkpoints_are_whole(run_dir: Path) -> None:
    result = run_command(run_dir, "verify")
    assert result.exit_code == 0
    assert result.stdout.count("  whole\n") == 3


def test_damaged_and_missing_checkpoints_are_listed_with_exit_code_1(run_dir: Path) -> None:
    (checkpoint_folder(run_dir, 2) / "theta.json").write_text("{}")
    shutil.rmtree(checkpoint_folder(run_dir, 4))
    result = run_command(run_dir, "verify")
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "step-00000002  damaged (its files are not those that were written)",
        "step-00000004  missing",
        "step-00000005  whole",
    ]
    assert run_command(run_dir, "verify", "5").exit_code == 0
    assert run_command(run_dir, "verify", "4").exit_code == 1
    assert "missing" in run_command(run_dir, "list").stdout


def test_a_folder_that_is_not_a_checkpoint_is_listed_with_exit_code_0(run_dir: Path) -> None:
    for name in ("step-00000003", "step-00000006.tmp"):
        (run_dir / "checkpoints" / name).mkdir()
    result = run_command(run_dir, "verify")
    assert result.exit_code == 0
    for name in ("step-00000003", "step-00000006.tmp"):
        assert f"{name}  {checkpoints.NOT_A_CHECKPOINT}" in result.stdout


def test_a_checkpoint_that_a_server_deleted_meanwhile_is_not_damaged(run_dir: Path) -> None:
    run = RunArchive(run_dir)
    first = run.checkpoint(2)
    with open_journal(run_dir) as db:
        db.execute("DELETE FROM checkpoints WHERE step = 2")
    shutil.rmtree(checkpoint_folder(run_dir, 2))
    assert run.verify(first).integrity is Integrity.REPLACED


def test_verify_reports_the_bytes_read(run_dir: Path) -> None:
    run, read = RunArchive(run_dir), list[int]()
    run.verify(run.checkpoint(2), read.append)
    assert sum(read) == run.num_bytes(run.checkpoint(2))


# --- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "3"), "has no checkpoint of step 3: it has those of steps 2, 4, 5."),
        (("restore", "3", "--yes"), "has no checkpoint of step 3"),
        (("export", "2"), "takes STEP FOLDER, or --best FOLDER"),
        (("export", "two", "out"), "takes STEP FOLDER, or --best FOLDER"),
        (("export", "2", "out", "--best"), "takes STEP FOLDER, or --best FOLDER"),
        (("export", "2", "."), "is not an empty folder: choose another folder"),
        (
            ("export", "2", "{run_dir}/new"),
            "is a run of the fake engine: there is no model to export",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    run_dir: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = run_command(run_dir, *[argument.format(run_dir=run_dir) for argument in arguments])
    assert result.exit_code == 2
    assert message in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["list"], ["verify"], ["restore", "2"], ["export", "2", "x"]])
def test_a_folder_without_a_run_is_refused_and_not_changed(
    tmp_path: Path, command: list[str]
) -> None:
    result = run_command(tmp_path / "nothing", *command)
    assert result.exit_code == 2
    assert "has no run: set --run-dir to the run directory of a server" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_unreadable_journal_is_one_line_and_exit_code_2(run_dir: Path) -> None:
    (run_dir / "journal.sqlite").write_bytes(b"no database" * 1000)
    result = run_command(run_dir, "list")
    assert result.exit_code == 2
    assert "cannot be read (file is not a database)" in result.stderr


def test_the_help_imports_no_slow_packages() -> None:
    script = (
        "import sys; from typer.testing import CliRunner\n"
        "from fakevllm_server.cli.main import app\n"
        "assert CliRunner().invoke(app, ['checkpoints', 'export', '--help']).exit_code == 0\n"
        "heavy = {'torch', 'rich.table', 'sqlalchemy', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
