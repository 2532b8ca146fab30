"""The lines that show the demo's progress if its output is not a terminal."""

from __future__ import annotations

from fakevllm.demo.progress_lines import ProgressLines
from fakevllm.demo.view import Snapshot


def test_a_phase_is_shown_once_although_its_seconds_count_up() -> None:
    lines = ProgressLines()
    assert lines.next(Snapshot("starting (embedded): 0 s", 0, 30)) == ["starting (embedded)"]
    assert lines.next(Snapshot("starting (embedded): 1 s", 0, 30)) == []
    assert lines.next(Snapshot("training", 0, 30)) == ["training"]


def test_each_tenth_of_the_training_is_shown_with_the_latest_mean_reward() -> None:
    lines = ProgressLines()
    shown: list[str] = []
    for num_done in range(31):
        rewards = [0.1 * min(step, 8) for step in range(num_done)]
        shown += lines.next(Snapshot("training", num_done + 1, 30, rewards))
    assert len(shown) == 1 + 10
    assert shown[1] == "step 3 of 30, mean reward of the latest steps 0.10"
    assert shown[-1] == "step 30 of 30, mean reward of the latest steps 0.80"


def test_parts_that_end_between_two_looks_are_shown_in_one_line() -> None:
    lines = ProgressLines()
    assert lines.next(Snapshot("training", 21, 30, [0.5] * 20)) == [
        "training",
        "step 20 of 30, mean reward of the latest steps 0.50",
    ]


def test_training_that_goes_back_shows_no_part_twice() -> None:
    lines = ProgressLines()
    lines.next(Snapshot("training", 21, 30))
    assert lines.next(Snapshot("training", 11, 30)) == []
    assert lines.next(Snapshot("training", 21, 30)) == []


def test_each_note_is_shown_once() -> None:
    lines = ProgressLines()
    assert lines.next(Snapshot("training", 0, 30, notes=["restarted"])) == ["training", "restarted"]
    assert lines.next(Snapshot("training", 0, 30, notes=["restarted", "again"])) == ["again"]
