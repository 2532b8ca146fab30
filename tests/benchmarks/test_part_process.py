"""Parts of a check of a GPU machine, which run as processes with time limits."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.gpu_machine import exit_code
from benchmarks.part_process import Part, run_together

PASSES = Part("passes", "-m this", modules=())
FAILS = Part("fails", "-m no_such_module", modules=())


def later(seconds: float = 60.0) -> float:
    return time.monotonic() + seconds


def test_a_part_that_fails_does_not_stop_the_others_and_says_why(tmp_path: Path) -> None:
    failed, passed = run_together([FAILS, PASSES], tmp_path, later())
    assert (passed.state, passed.reason, passed.exit_code) == ("passed", "", 0)
    assert failed.state == "failed"
    assert failed.reason.startswith("exit code 1: ")
    assert failed.reason.endswith("No module named no_such_module")
    assert exit_code([failed, passed]) == 1


def test_a_part_whose_packages_are_missing_is_skipped_with_their_names(tmp_path: Path) -> None:
    part = Part("needs", "-m this", modules=("json", "no_such_module"))
    skipped, passed = run_together([part, PASSES], tmp_path, later())
    assert (skipped.state, skipped.reason) == ("skipped", "not installed: no_such_module")
    assert not (tmp_path / "needs.log").exists()
    assert exit_code([skipped, passed]) == 0
    assert exit_code([skipped]) == 1, "a check that ran nothing has not passed"


def test_a_part_that_takes_longer_than_its_limit_is_killed(tmp_path: Path) -> None:
    part = Part("waits", "-m http.server 0 --bind 127.0.0.1", modules=(), limit_s=1.0)
    (killed,) = run_together([part], tmp_path, later())
    assert (killed.state, killed.exit_code) == ("failed", -9)
    assert killed.reason == "not finished within 1 s"


def test_the_time_of_a_part_does_not_depend_on_a_part_before_it(tmp_path: Path) -> None:
    slow = Part("waits", "-m http.server 0 --bind 127.0.0.1", modules=(), limit_s=8.0)
    killed, passed = run_together([slow, PASSES], tmp_path, later())
    assert passed.seconds < killed.seconds


def test_no_part_starts_when_the_time_is_over(tmp_path: Path) -> None:
    (skipped,) = run_together([PASSES], tmp_path, later(-1.0))
    assert (skipped.state, skipped.reason) == ("skipped", "0 s are left")
