"""The figures of the benchmark about users' edits, from numbers instead of runs."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.edits_or_thumbs import HEADER, RunFigures, cells, failures, held_out_tasks
from fakevllm.demo.tasks import training_tasks

EDITS = RunFigures(before=0.25, after=0.75, thumbs=90, edits=60, steps=15)
THUMBS = RunFigures(before=0.25, after=0.5, thumbs=90, edits=0, steps=9)


def test_edits_must_gain_more_than_thumbs() -> None:
    assert failures(0, EDITS, THUMBS) == []
    equal = replace(THUMBS, after=0.75)
    assert failures(1, EDITS, equal) == ["seed 1: edits gained +0.500, and thumbs +0.500"]
    assert len(cells(0, "thumbs", THUMBS)) == len(HEADER)


def test_no_user_asks_about_a_held_out_sum() -> None:
    asked = {task.main_query for task in training_tasks()}
    assert held_out_tasks() and not asked & {task.main_query for task in held_out_tasks()}
