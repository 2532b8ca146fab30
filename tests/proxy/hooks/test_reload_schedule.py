"""Edited hook files are tried once, when they do not change any more."""

from __future__ import annotations

from fakevllm.hooks.reload_schedule import ReloadSchedule


def due(schedule: ReloadSchedule, *steps: tuple[float, str | None]) -> list[float]:
    """Return the times at which the edited hook files were due to be loaded, while the hooks `old`
    ran."""
    return [now_s for now_s, files in steps if schedule.is_due(files, "old", now_s)]


def test_files_are_tried_when_they_have_settled() -> None:
    schedule = ReloadSchedule(settle_s=1.0)
    assert due(schedule, (0, "old"), (1, "a"), (1.9, "b"), (2.8, "b")) == []
    assert schedule.is_settling
    assert due(schedule, (2.9, "b"), (9, "b")) == [2.9]
    assert not schedule.is_settling


def test_refused_files_are_not_tried_again_until_they_change() -> None:
    schedule = ReloadSchedule(settle_s=0.0)
    steps = ((0.0, "bad"), (1.0, "bad"), (2.0, "worse"), (3.0, "old"), (4.0, "bad"), (5.0, "bad"))
    assert due(schedule, *steps) == [0.0, 2.0, 4.0]
    schedule.tried(None)
    assert due(schedule, (6.0, "bad"), (7.0, "bad")) == [6.0]


def test_files_that_cannot_be_read_are_not_tried() -> None:
    schedule = ReloadSchedule(settle_s=1.0)
    assert due(schedule, (0, None), (5, None), (6, "new"), (7, "new")) == [7]


def test_nothing_is_due_once_the_files_run() -> None:
    schedule = ReloadSchedule(settle_s=0.0)
    assert schedule.is_due("new", "old", 0.0)
    assert not schedule.is_due("new", "new", 1.0)
    assert not schedule.is_settling


def test_files_that_were_edited_before_the_trial_read_them_are_not_tried_twice() -> None:
    schedule = ReloadSchedule(settle_s=0.0)
    assert schedule.is_due("a", "old", 0.0)
    schedule.tried("b")
    assert due(schedule, (1.0, "b"), (2.0, "a")) == [2.0]
