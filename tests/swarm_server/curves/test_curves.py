"""Curves of real journals, read with TensorBoard's own reader: each trained step has one point."""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fakevllm_adapters.protocol.releases import Decision
from fakevllm_server.curves import event_files
from fakevllm_server.curves.event_files import FOLDER, EventFiles
from fakevllm_server.curves.points import Cursor, Point
from fakevllm_server.curves.run_follower import Follower
from fakevllm_server.curves.tracker import TrackerMissing
from tests.swarm_server.curves.charted_run import TENSORBOARD, Run
from tests.swarm_server.curves.readings import Charts


async def test_each_step_is_a_point_with_verls_names_and_the_time_of_its_weights(run: Run) -> None:
    before = time.time()
    await run.train("a", "b")
    assert run.chart() == 2
    charts = run.charts
    assert charts.steps() == [1, 2]
    assert charts.points("critic/rewards/mean") == [(1, 0.5), (2, 0.5)]
    assert charts.points("response_length/mean") == [(1, 2.0), (2, 2.0)]
    assert charts.points("prompt_length/max") == [(1, 3.0), (2, 3.0)]
    assert charts.points("actor/pg_loss") == [(1, 0.0), (2, 0.0)]
    assert charts.points("critic/advantages/mean")[0][1] == pytest.approx(0.0)
    assert charts.steps("timing_s/step") == [
        2
    ]  # the first step has no previous step to measure from
    assert "fakevllm/tie_rate" in charts.names
    assert all(before <= at <= time.time() for at in charts.times("actor/loss"))


async def test_curves_of_rewards_are_interrupted_where_the_hooks_change(run: Run) -> None:
    await run.train("a", "b", hooks="first")
    run.chart()
    run.reopen_curves()
    await run.train("c", "d", hooks="second")
    run.chart()
    values = run.charts.points("critic/rewards/mean")
    assert [step for step, _ in values] == [1, 2, 3, 3, 4]
    assert [step for step, value in values if math.isnan(value)] == [3]
    assert run.charts.steps() == [1, 2, 3, 4]
    raw = b"".join(file.read_bytes() for file in run.files)
    assert b"Step 3: the hooks changed. Earlier rewards are not comparable" in raw
    assert raw.count(b"hooks changed") == 1


async def test_a_change_of_the_hooks_is_in_the_run_log_also_after_a_crash(run: Run) -> None:
    await run.train("a", "b", hooks="first")
    await run.crash()
    await run.catch_up()
    await run.train("c", hooks="first")
    await run.train("d", hooks="second")
    await run.crash()
    await run.catch_up()
    steps = {entry.step: entry for entry in run.process.log.entries_after(0) if entry.hooks}
    assert {step: entry.changed for step, entry in steps.items()} == {
        **{1: "", 2: "", 3: ""},
        4: "the hooks changed",
    }
    assert len({entry.job for entry in steps.values()}) == 1 and steps[1].job


async def test_nothing_is_written_if_nothing_is_new(run: Run) -> None:
    await run.train("a")
    assert run.chart() == 1
    size = run.files[0].stat().st_size
    assert run.chart() == 0
    assert [file.stat().st_size for file in run.files] == [size]


async def test_a_step_that_is_trained_again_after_a_crash_has_one_point(
    run: Run,
) -> None:
    await run.train("a", "b", "c")  # saved at 2
    run.chart()
    await run.crash()
    await run.catch_up()  # step 3 again
    await run.train("d")
    run.chart()
    assert len(run.files) == 2
    assert run.charts.steps() == [1, 2, 3, 4]


async def test_curves_written_afterwards_equal_those_written_during_the_run(run: Run) -> None:
    await run.train("a", "b", "c")
    run.chart()
    await run.crash()
    await run.catch_up()
    await run.evaluate(0.5)
    await run.train("d")
    await run.decide(Decision.CANDIDATE, run.process.log.version)
    await run.decide(Decision.RELEASED, run.process.log.version)
    run.chart(is_last=True)
    followed = {name: run.charts.points(name) for name in run.charts.names}
    run.curves.clear()
    run.chart(is_last=True)
    assert len(run.files) == 1
    assert {name: run.charts.points(name) for name in run.charts.names} == followed


async def test_a_cursor_behind_the_event_file_duplicates_no_step(run: Run) -> None:
    await run.train("a", "b")
    run.chart()
    (run.folder / FOLDER / "cursor.json").write_text('{"entry": 0}')
    run.reopen_curves()
    run.chart()
    assert run.charts.steps() == [1, 2]


async def test_a_record_that_was_cut_off_does_not_hide_later_records(run: Run) -> None:
    await run.train("a")
    run.chart()
    with run.files[0].open("ab") as file:
        file.write(b"\x10\x00\x00")
    run.reopen_curves()
    await run.train("b")
    run.chart()
    assert run.charts.steps() == [1, 2]


async def test_evaluations_are_charted_at_the_step_whose_weights_were_served(run: Run) -> None:
    await run.evaluate(0.0)
    await run.train("a")
    await run.evaluate(0.25)
    await run.evaluate(0.75)
    await run.train("b")
    await run.evaluate(1.0)
    run.chart()
    assert run.charts.points("val/reward/mean") == [(0, 0.0), (1, 0.5)]
    run.chart(is_last=True)
    assert run.charts.points("val/reward/mean") == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert run.charts.points("val/episodes")[1] == (1, 2.0)


async def test_evaluations_of_a_rolled_back_step_return_when_it_is_trained_again(
    run: Run,
) -> None:
    await run.train("a", "b", "c")
    await run.evaluate(1.0)  # of step 3, which has no checkpoint
    run.chart(is_last=True)
    assert run.evaluations == [(3, 1.0)]
    await run.crash()
    run.chart(is_last=True)
    assert run.evaluations == []
    await run.catch_up()
    run.chart(is_last=True)
    assert run.evaluations == [(3, 1.0)]
    run.curves.clear()
    run.chart(is_last=True)
    assert run.evaluations == [(3, 1.0)]


async def test_evaluations_before_and_after_a_rollback_to_their_step_are_averaged_together(
    run: Run,
) -> None:
    await run.train("a", "b")  # saved at 2
    await run.evaluate(0.0)
    await run.train("c")
    await run.evaluate(1.0)
    run.chart(is_last=True)
    await run.crash()
    run.chart(is_last=True)
    assert run.evaluations == [(2, 0.0)]
    await run.evaluate(0.5)
    await run.catch_up()
    run.chart(is_last=True)
    assert run.evaluations == [(2, 0.0), (2, 0.25), (3, 1.0)]


async def test_evaluations_of_a_step_that_was_given_up_do_not_return(run: Run) -> None:
    await run.train("a", "b", "c")
    await run.evaluate(1.0)
    run.chart(is_last=True)
    run.process.log.record_abandoned(2, 4, "gone_back")
    await run.crash()
    await run.train("d")  # another step 3
    await run.evaluate(0.5)
    run.chart(is_last=True)
    assert run.evaluations == [(3, 0.5)]
    run.curves.clear()
    run.chart(is_last=True)
    assert run.evaluations == [(3, 0.5)]


async def test_a_decision_about_releases_is_at_the_step_that_training_had_reached(
    run: Run,
) -> None:
    await run.decide(Decision.HOLD)
    await run.train("a", "b")
    await run.decide(Decision.RELEASED, 1)
    await run.train("c")
    await run.decide(Decision.RESUME)
    run.chart()
    assert run.charts.points("fakevllm/releases/held") == [(0, 1.0), (3, 0.0)]
    assert run.charts.points("fakevllm/releases/released") == [(2, 1.0)]
    raw = b"".join(file.read_bytes() for file in run.files)
    assert b"Version 1: released by the release gate." in raw


async def test_a_decision_at_a_discarded_step_is_shown_where_training_went_back_to(
    run: Run,
) -> None:
    await run.train("a", "b", "c")  # saved at 2
    await run.decide(Decision.CANDIDATE, 3)
    run.chart()
    assert run.charts.points("fakevllm/releases/candidate") == [(3, 3.0)]
    await run.crash()
    await run.catch_up()  # step 3 again
    await run.decide(Decision.RELEASED, 3)
    run.chart()
    assert run.charts.points("fakevllm/releases/candidate") == [(2, 3.0)]
    assert run.charts.points("fakevllm/releases/released") == [(3, 3.0)]
    run.curves.clear()
    run.chart()
    assert run.charts.points("fakevllm/releases/candidate") == [(2, 3.0)]


def test_a_failed_write_is_retried_without_losing_a_step(tmp_path: Path) -> None:
    files = EventFiles(tmp_path / "x" / "tensorboard")
    (tmp_path / "x").write_text("a file at the path of the folder")
    point = Point(1, 1.0, {"training/global_step": 1.0})
    with pytest.raises(OSError):
        files.write([point], Cursor(entry=1))
    assert files.cursor() == Cursor()
    (tmp_path / "x").unlink()
    files.write([point], Cursor(entry=1))
    files.close()
    assert files.cursor() == Cursor(entry=1)
    assert Charts(tmp_path / "x").steps() == [1]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_follower_writes_during_the_run_and_the_rest_at_its_end(
    run: Run,
) -> None:
    follower = Follower(run.folder, TENSORBOARD, every_s=0.01)
    follower.start()
    await run.train("a")
    await until(lambda: run.files and run.charts.steps() == [1])
    await run.train("b")
    await run.evaluate(1.0)
    assert run.process.journal.drain()
    follower.close()
    assert run.charts.steps() == [1, 2]
    assert run.charts.points("val/reward/mean") == [(2, 1.0)]


async def test_a_repeated_error_of_a_follower_is_logged_once_and_retried(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    (run.folder / FOLDER).write_text("a file at the path of the folder")
    await run.train("a")
    assert run.process.journal.drain()
    follower = Follower(run.folder, TENSORBOARD, every_s=0.01)
    follower.start()
    await until(lambda: "TensorBoard curves cannot be written" in caplog.text)
    (run.folder / FOLDER).unlink()
    await until(lambda: run.files and run.charts.steps() == [1])
    follower.close()
    assert caplog.text.count("TensorBoard curves cannot be written") == 1


async def test_a_missing_package_is_logged_when_there_is_something_to_write(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(event_files.importlib, "import_module", missing)
    caplog.set_level(logging.INFO)
    idle = Follower(run.folder, TENSORBOARD)
    idle.start()
    idle.close()
    assert "tensorboard" not in caplog.text.lower()  # nothing to write
    await run.train("a")
    assert run.process.journal.drain()
    follower = Follower(run.folder, TENSORBOARD)
    follower.start()
    follower.close()
    assert "pip install tensorboard" in caplog.text
    assert run.files == []
    with pytest.raises(TrackerMissing):
        run.curves.clear()


def test_a_follower_without_a_journal_ends_with_its_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    follower = Follower(tmp_path, TENSORBOARD, every_s=0.01)
    follower.start()
    follower.close()
    assert not any(thread.name == "curves" for thread in threading.enumerate())
    assert caplog.text.count("TensorBoard curves cannot be written") == 1


async def test_a_follower_takes_no_database_lock(run: Run) -> None:
    await run.train("a")
    assert run.process.journal.drain()
    writing = sqlite3.connect(run.folder / "journal.sqlite", isolation_level=None)
    writing.execute("BEGIN IMMEDIATE")
    assert run.curves.catch_up(time.time()) == 1
    writing.execute("ROLLBACK")
    writing.close()
