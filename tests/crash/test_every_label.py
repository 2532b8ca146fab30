"""A server killed at every named place, and started again until its client's script is done."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash.invariants import check_after_crash, check_all, finish_and_check
from crash.labels import all_labels
from crash.nursery import Nursery, labels_of

LATER = (
    "call.after_commit:20",
    "end_episode.before_commit:4",
    "end_group.after_commit:9",
    "plan.after_commit:4",
    "train.updated:3",
    "train.before_commit:7",
    "train.after_commit:3",
    "train.after_commit:9",
    "save.written:4",
    "save.renamed:5",
    "publish.before:6",
    "prune.before_commit:5",
    "prune.after_commit:5",
    "drop.before_commit:2",
    "drop.after_commit:2",
    "roll_back.after_commit:2",
    "meta.after_commit:5",
)
"""Between two checkpoints, where something is pruned, in a second engine's life."""


async def test_the_script_passes_every_label_there_is(nursery: Nursery, run_dir: Path) -> None:
    """And without a crash all of it holds."""
    nursery.finish(run_dir)
    assert set(all_labels()) == set(labels_of(run_dir))
    await check_all(run_dir)


@pytest.mark.parametrize("label", [*all_labels(), *LATER])
async def test_nothing_is_lost_or_done_twice_by_a_crash(
    nursery: Nursery, run_dir: Path, label: str
) -> None:
    await _survive(nursery, run_dir, label)


@pytest.mark.parametrize(
    "labels",
    [
        (
            "train.after_commit:5",
            "roll_back.before_commit",
            "roll_back.after_commit",
            "save.synced",
        ),
        (
            "end_episode.before_commit",
            "claim.before_commit",
            "reopen.after_commit",
            "call.before_commit",
        ),
        ("abandon.before_commit", "abandon.after_commit", "publish.before", "train.before_commit"),
    ],
    ids=" ".join,
)
async def test_nor_by_a_crash_of_the_recovery(
    nursery: Nursery, run_dir: Path, labels: tuple[str, ...]
) -> None:
    await _survive(nursery, run_dir, *labels)


async def _survive(nursery: Nursery, run_dir: Path, *labels: str) -> None:
    for label in labels:
        nursery.crash(run_dir, label)
        check_after_crash(run_dir)
    await finish_and_check(nursery, run_dir)
