"""The suite finds a commit that comes before its flush, and an acknowledgement before its commit:
the same crashes at which the server as it is loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash.finished import Finished
from crash.invariants import (
    check_after_crash,
    finish_and_check,
    v1_acknowledged_is_accounted_for,
)
from crash.nursery import Nursery

CASES = {
    "acknowledges_before_the_commit": "end_episode.before_commit:4",
    "commits_what_is_not_flushed": "train.after_commit:2",
    "commits_before_the_rename": "train.after_commit:2",
}


@pytest.mark.parametrize("wrong", CASES)
def test_a_wrong_order_is_found(nursery: Nursery, run_dir: Path, wrong: str) -> None:
    nursery.crash(run_dir, CASES[wrong], wrong=wrong)
    with pytest.raises(AssertionError, match=r"is lost|no whole folder|is pooled when all is"):
        _check_at_once(run_dir)


@pytest.mark.parametrize("label", sorted(set(CASES.values())))
async def test_at_the_same_place_the_right_order_loses_nothing(
    nursery: Nursery, run_dir: Path, label: str
) -> None:
    nursery.crash(run_dir, label)
    _check_at_once(run_dir)
    await finish_and_check(nursery, run_dir)


def _check_at_once(run_dir: Path) -> None:
    """At these places every group that was acknowledged has been trained."""
    check_after_crash(run_dir)
    v1_acknowledged_is_accounted_for(Finished(run_dir))
