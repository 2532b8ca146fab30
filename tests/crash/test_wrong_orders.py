"""The suite detects a commit before its flush, and an acknowledgement before its commit.

The real server loses nothing at the same crash points.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from crash.fork_server import ForkServer
from crash.invariants import (
    check_after_crash,
    finish_and_check,
    v1_acknowledged_is_accounted_for,
)
from crash.run_files import RunFiles

CASES = {
    "acknowledges_before_the_commit": "end_episode.before_commit:4",
    "commits_before_the_flush": "train.after_commit:2",
    "commits_before_the_rename": "train.after_commit:2",
}


@pytest.mark.parametrize("wrong", CASES)
def test_a_wrong_order_is_detected(fork_server: ForkServer, run_dir: Path, wrong: str) -> None:
    fork_server.run_to_crash(run_dir, CASES[wrong], wrong=wrong)
    with pytest.raises(AssertionError, match=r"is lost|no complete folder|is pooled at the end"):
        _check_at_once(run_dir)


@pytest.mark.parametrize("label", sorted(set(CASES.values())))
async def test_the_right_order_loses_nothing_at_the_same_crash_point(
    fork_server: ForkServer, run_dir: Path, label: str
) -> None:
    fork_server.run_to_crash(run_dir, label)
    _check_at_once(run_dir)
    await finish_and_check(fork_server, run_dir)


def _check_at_once(run_dir: Path) -> None:
    """Check the files right after a crash at which each acknowledged group has been trained."""
    check_after_crash(run_dir)
    v1_acknowledged_is_accounted_for(RunFiles(run_dir))
