"""`fakevllm-server checkpoints`, over runs that a whole server made with the fake engine. What is
exported of a real model: tests/backends/embedded/test_export_command.py."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from swarm_server.samples import call
from typer.testing import CliRunner, Result

from fakevllm_adapters.swarm import EndGroupReply, EndGroupRequest, EngineStatus, SiblingRef
from fakevllm_adapters.train_job import TrainJob
from fakevllm_server import checkpoints_command
from fakevllm_server.cli import app
from fakevllm_server.config import ServerConfig
from fakevllm_server.crash_points import EXIT_CODE
from fakevllm_server.journal import reads
from fakevllm_server.journal.facts import PRUNED, SavedCheckpoint
from fakevllm_server.run_folder import RunFolder
from fakevllm_server.saved_run import SavedRun, Verdict
from fakevllm_server.saves import best
from fakevllm_server.swarm import Swarm

JOB = TrainJob(num_repeat=2, batch_size=1, lr=0.1, save_freq=2)
GROUPS = ["a", "b", "c", "d", "e"]
YES, NO = [ord("y"), 5], [ord("n"), 5]


class Life:
    """A server with a fake engine that trains one group a step."""

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm

    async def train(self, name: str, *rewards: float) -> None:
        before = self.swarm.runlog.last_step
        assert (await self.end_group(name, *rewards)).pooled
        await self.until(lambda: self.swarm.runlog.last_step > before)

    async def end_group(self, name: str, *rewards: float) -> EndGroupReply:
        rewards = rewards or (1.0, 0.0)
        for index, ids in enumerate((YES, NO)):
            sampled = replace(call(self.swarm.engine.version), response_ids=ids)
            await self.swarm.intake.add_call(SiblingRef(name, index), sampled)
        end = EndGroupRequest(group_id=name, rewards=list(rewards))
        reply = await self.swarm.intake.end_group(end, self.swarm.closed)
        self.swarm.changed()
        return reply

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until it holds, and groups are taken."""
        async with asyncio.timeout(30):
            while not (condition() and self.swarm.engine.status is EngineStatus.ROLLING):
                await self.swarm.engine.next_move()


@asynccontextmanager
async def life(run_dir: Path, job: TrainJob = JOB) -> AsyncGenerator[Life]:
    swarm = Swarm(ServerConfig("fake", run_dir))
    try:
        swarm.job = job
        async with swarm.changing_engine:
            await swarm.start_engine()
        one = Life(swarm)
        await one.until(lambda: True)
        yield one
    finally:
        await swarm.close()


@pytest.fixture(scope="module")
def five_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved after steps 2, 4 and 5; the highest rewards are those up to step 2."""
    run_dir = tmp_path_factory.mktemp("run") / "run"

    async def train() -> None:
        async with life(run_dir) as one:
            for name in GROUPS:
                await one.train(name, *((1.0, 0.5) if name in "ab" else (1.0, 0.0)))

    asyncio.run(train())
    return run_dir


@pytest.fixture
def run_dir(five_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(five_steps, tmp_path / "run"))


def ask(run_dir: Path, *arguments: str, answer: str | None = None) -> Result:
    command = ["checkpoints", *arguments, "--run-dir", str(run_dir)]
    return CliRunner(env={"COLUMNS": "100"}).invoke(app, command, input=answer)


def listed(run_dir: Path) -> list[dict[str, object]]:
    return json.loads(ask(run_dir, "list", "--json").stdout)


def saved(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def theta(run_dir: Path, step: int) -> float:
    return json.loads((saved(run_dir, step) / "theta.json").read_text())["theta"]


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
    found = best(known)
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
        assert f"{name}  {checkpoints_command.STRANGER}" in result.stdout


def test_what_a_server_takes_away_meanwhile_is_no_damage(run_dir: Path) -> None:
    run = SavedRun(run_dir)
    first = run.checkpoint(2)
    with opened(run_dir) as db:
        db.execute("DELETE FROM checkpoints WHERE step = 2")
    shutil.rmtree(saved(run_dir, 2))
    assert run.verify(first).verdict is Verdict.REPLACED


def test_reading_tells_how_far_it_is(run_dir: Path) -> None:
    run, read = SavedRun(run_dir), list[int]()
    run.verify(run.checkpoint(2), read.append)
    assert sum(read) == run.num_bytes(run.checkpoint(2))


# --- restore


async def test_the_next_start_goes_on_from_the_restored_step(run_dir: Path) -> None:
    given_up = theta(run_dir, 4)
    result = await asyncio.to_thread(ask, run_dir, "restore", "2", "--yes")
    assert result.exit_code == 0, result.output
    assert "up to step 5" in result.stdout and "3 groups" in result.stdout
    assert [row["step"] for row in listed(run_dir)] == [2]
    assert not saved(run_dir, 4).exists() and not saved(run_dir, 5).exists()

    async with life(run_dir) as one:
        assert (one.swarm.runlog.last_step, one.swarm.engine.global_step) == (2, 3)
        assert one.swarm.engine.version > 5
        told = [entry for entry in one.swarm.runlog.after(0) if entry.kind == "restored"]
        assert [(entry.step, entry.lost) for entry in told] == [(2, ["c", "d", "e"]), (2, [])]
        await one.end_group("c")  # sent again: answered as before, and to no effect
        assert one.swarm.pool.num_finished == 0
        for name in ("f", "g"):
            await one.train(name)
        assert one.swarm.engine.version > 7
        versions = [entry.version for entry in one.swarm.runlog.after(0) if entry.version]
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
        assert one.swarm.engine.global_step == 3
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
        assert one.swarm.engine.global_step == 6


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
        await one.until(lambda: one.swarm.runlog.last_step == 3)
        lost = [entry.lost for entry in one.swarm.runlog.after(0) if entry.kind == "restored"]
        assert lost == [["c", "d", "e"], [], []]
        assert one.swarm.journal.read(reads.why_ended, "f") == "already_trained"


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
        "import sys; from typer.testing import CliRunner; from fakevllm_server.cli import app\n"
        "assert CliRunner().invoke(app, ['checkpoints', 'export', '--help']).exit_code == 0\n"
        "heavy = {'torch', 'rich.table', 'sqlalchemy', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def states(run_dir: Path) -> dict[str, str]:
    with opened(run_dir) as db:
        return dict(db.execute("SELECT group_id, state FROM groups ORDER BY group_id").fetchall())


@contextmanager
def opened(run_dir: Path) -> Generator[sqlite3.Connection]:
    with closing(sqlite3.connect(run_dir / "journal.sqlite")) as db, db:
        yield db


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix not in (".sqlite-wal", ".sqlite-shm")
    }
