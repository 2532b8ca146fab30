"""Edited hooks are tried on the ledger's groups, and take over within the limits."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from fakevllm.config.hook_reload import ReloadSection
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.hook_versions import MAX_OPEN, HookVersions
from fakevllm.hooks.loader import content_hash
from fakevllm.hooks.version_leases import Use
from fakevllm.ledger.store import Ledger
from fakevllm.rescoring.hook_reloader import HookReloader, ReloadsStopped, ReloadState
from fakevllm.rescoring.hook_trial import HookTrial, Trial
from fakevllm_adapters.protocol.swarm import Task
from tests.proxy.hooks.hook_calls import reward
from tests.proxy.hooks.test_worker_trouble import until_exists
from tests.proxy.ledger.ledger_cases import group

NUM_GROUPS = 12
FIRST = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(-one.index) for one in valid_results]
"""
LAST = FIRST.replace("float(-", "float(")
NEEDS_ROW = """
def on_compute_relative_reward(valid_results, all_answers):
    return [valid_results[0].task.metadata["answer"] + one.index for one in valid_results]
"""


class Rig:
    """A reloader with a ledger of 12 groups, in which the hooks of `FIRST` run."""

    def __init__(self, folder: Path) -> None:
        self.file, self.code = folder / "ledger.sqlite", folder / "hook.py"
        self.ledger = Ledger.open(self.file)
        self.tasks: dict[str, Task] = {}
        for number in range(NUM_GROUPS):
            one = group(f"g{number:02}", [1.0, 0.0], received_at=1000.0 + number)
            self.ledger.record(replace(one, served_by="best"))

    async def start(self) -> Rig:
        assert await self.ledger.flush()
        self.code.write_text(FIRST)
        worker = self.worker()
        await worker.start()
        self.versions = HookVersions(worker, now=0.0)
        return self

    def worker(self) -> HookWorker:
        return HookWorker(self.code, 20.0)

    def reloader(self, text: str, **limits: float) -> HookReloader:
        """Edit the hooks, and return a reloader."""
        self.code.write_text(text)
        section = ReloadSection.model_validate(limits)
        trial = HookTrial(self.ledger, self.file, self.tasks.get, section)
        return HookReloader(self.versions, self.worker, trial, section.max_s, lambda: 7.0)


@pytest_asyncio.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = await Rig(tmp_path).start()
    yield rig
    await rig.versions.close()
    rig.ledger.close()


async def test_new_hooks_take_over_with_all_figures_of_the_trial(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fakevllm.hooks")
    old = rig.versions.info.content_hash
    reloader = rig.reloader(LAST, groups=10)
    outcome = await reloader.reload()
    new = rig.versions.info.content_hash
    assert outcome.state is ReloadState.TAKEN_OVER and outcome.at == rig.versions.since == 7.0
    assert outcome.message == f"The new hooks {new} took over from {old}: tried on 10 groups."
    assert outcome.figures is not None
    assert outcome.figures["num_reordered"] == outcome.figures["num_served_otherwise"] == 10
    assert "another sibling would have been served in 10 of 10 (100 %) groups" in outcome.changes
    assert caplog.messages == [outcome.message, *(f"  {line}" for line in outcome.changes)]
    assert reloader.last == outcome
    assert (await reward(rig.versions.current, "a", "b")).rewards == [0.0, 1.0]
    assert rig.versions.num_open == 1


async def test_the_trial_writes_nothing_into_the_ledger(rig: Rig) -> None:
    await rig.reloader(LAST).reload()
    with closing(sqlite3.connect(rig.file)) as db:
        assert db.execute("SELECT COUNT(*) FROM rescored").fetchone() == (0,)
        assert db.execute("SELECT DISTINCT hook_hash FROM groups").fetchall() == [
            (group().hook_hash,)
        ]


async def test_refused_hooks_leave_no_process_and_are_logged_in_one_line(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    pid_file = rig.code.with_name("pid")
    code = f"import os, pathlib\npathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))\n"
    reloader = rig.reloader(code + "def on_compute_relative_reward(v, a):\n    return [1.0]\n")
    before = rig.versions.current
    outcomes = [await reloader.reload(), await reloader.reload()]
    for outcome in outcomes:
        assert outcome.state is ReloadState.REFUSED
        assert "hook_length: got 1, want 2" in outcome.message
    assert not Path(f"/proc/{pid_file.read_text()}").exists()
    assert rig.versions.current is before and rig.versions.since == 0.0
    assert caplog.messages == [outcomes[0].message]


async def test_unchanged_files_are_not_tried(rig: Rig) -> None:
    reloader = rig.reloader(FIRST)
    outcome = await reloader.reload()
    assert outcome.state is ReloadState.UNCHANGED and reloader.last is None


async def test_missing_files_are_refused(rig: Rig) -> None:
    reloader = rig.reloader(LAST)
    rig.code.unlink()
    outcome = await reloader.reload()
    assert outcome.state is ReloadState.REFUSED and "no such file" in outcome.message


async def test_groups_of_unknown_rows_and_damaged_groups_are_skipped(rig: Rig) -> None:
    for number in range(NUM_GROUPS):
        rig.ledger.record(group(f"g{number:02}", [1.0, 0.0], task_id=f"row-{number % 2}"))
    await rig.ledger.flush()
    with closing(sqlite3.connect(rig.file)) as db, db:
        db.execute("UPDATE sibling_rows SET message_json = '{' WHERE group_id = 'g00'")
    rig.tasks["row-0"] = Task(task_id="row-0", main_query="1+1?", metadata={"answer": 2})
    outcome = await rig.reloader(NEEDS_ROW).reload()
    assert outcome.state is ReloadState.TAKEN_OVER, outcome.message
    assert "tried on 5 groups (7 more cannot be read, have redacted texts, or" in outcome.message


async def test_without_a_trial_hooks_take_over_after_loading(rig: Rig) -> None:
    outcome = await rig.reloader("x = y\n", groups=0).reload()
    assert outcome.state is ReloadState.REFUSED and "NameError" in outcome.message
    outcome = await rig.reloader(LAST, groups=0).reload()
    assert "tried on 0 groups" in outcome.message and outcome.figures is None


async def test_a_ledger_that_cannot_be_read_refuses_the_hooks(rig: Rig) -> None:
    trial = HookTrial(rig.ledger, rig.file.with_name("none.sqlite"), rig.tasks.get, ReloadSection())
    rig.code.write_text(LAST)
    outcome = await HookReloader(rig.versions, rig.worker, trial, 60.0).reload()
    assert outcome.state is ReloadState.REFUSED and "cannot be read" in outcome.message


async def test_hooks_wait_while_many_older_versions_have_groups(rig: Rig) -> None:
    for number in range(MAX_OPEN - 1):
        rig.versions.begin(f"g{number}", Use.SIBLINGS)
        outcome = await rig.reloader(f"{LAST}# {number}\n").reload()
        assert outcome.state is ReloadState.TAKEN_OVER
    reloader = rig.reloader(LAST)
    assert await reloader.reload_edited() is None
    assert reloader.last is not None and "3 older versions" in reloader.last.message
    rig.versions.end("g1", Use.SIBLINGS)
    assert await reloader.reload_edited() == content_hash(rig.code)
    assert rig.versions.num_open == 3


async def test_a_reload_goes_on_without_its_caller_and_ends_with_the_reloader(rig: Rig) -> None:
    begun = rig.code.with_name("begun")
    hangs = f"""
import asyncio, pathlib
async def on_compute_relative_reward(v, a):
    pathlib.Path({str(begun)!r}).touch()
    await asyncio.sleep(600)
"""
    reloader = rig.reloader(hangs)
    call = asyncio.create_task(reloader.reload())
    await until_exists(begun)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    second = asyncio.create_task(reloader.reload())
    await asyncio.sleep(0.1)
    assert not second.done()
    async with asyncio.timeout(20):
        await reloader.close()
    with pytest.raises(ReloadsStopped):
        await second
    with pytest.raises(ReloadsStopped):
        await reloader.reload()
    assert await reloader.reload_edited() is None
    assert (await reward(rig.versions.current, "a", "b")).rewards == [0.0, -1.0]


async def test_an_unexpected_error_refuses_the_hooks_in_one_line(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenTrial(HookTrial):
        async def run(self, worker: HookWorker, trial: Trial) -> str | None:
            raise RuntimeError("a bug\nin two lines")

    rig.code.write_text(LAST)
    trial = BrokenTrial(rig.ledger, rig.file, rig.tasks.get, ReloadSection())
    reloader = HookReloader(rig.versions, rig.worker, trial, 60.0)
    outcome = await reloader.reload()
    assert outcome.state is ReloadState.REFUSED and reloader.last == outcome
    assert "the trial failed with RuntimeError: a bug." in outcome.message
    rig.code.unlink()
    rig.code.symlink_to(rig.code)
    outcome = await reloader.reload()
    assert outcome.state is ReloadState.REFUSED and reloader.last == outcome
    assert "Symlink loop" in outcome.message
    assert caplog.messages == [line for line in caplog.messages if "\n" not in line]

    def broken_worker() -> HookWorker:
        raise OSError("no memory")

    outcome = await HookReloader(rig.versions, broken_worker, trial, 60.0).reload()
    assert outcome.state is ReloadState.REFUSED and "OSError: no memory" in outcome.message


async def test_redacted_groups_are_skipped_because_the_old_hooks_had_their_whole_texts(
    rig: Rig,
) -> None:
    redacted = '{"messages":[{"role":"user","content":"[redacted: email]"}]}'
    for number in range(4):
        one = group(f"g{number:02}", [1.0, 0.0], received_at=1000.0 + number)
        rig.ledger.record(replace(one, request_json=redacted))
    await rig.ledger.flush()
    outcome = await rig.reloader(LAST).reload()
    assert outcome.state is ReloadState.TAKEN_OVER, outcome.message
    assert "tried on 8 groups (4 more " in outcome.message


async def test_hooks_are_refused_if_no_group_of_the_ledger_can_be_tried(rig: Rig) -> None:
    for number in range(NUM_GROUPS):
        rig.ledger.record(group(f"g{number:02}", [1.0, 0.0], task_id="unknown"))
    await rig.ledger.flush()
    outcome = await rig.reloader(LAST).reload()
    assert outcome.state is ReloadState.REFUSED
    assert "none of the latest 12 groups could be tried" in outcome.message
