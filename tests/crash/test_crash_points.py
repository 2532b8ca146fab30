"""Kill a server at each crash point, and restart it until its client's script is done."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash.crash_labels import all_labels, training_labels
from crash.fork_server import ForkServer, passed_labels
from crash.invariants import check_after_crash, check_all, finish_and_check

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
    "release.before_commit:4",
    "release.after_commit:4",
    "go_back.restored:2",
    "go_back.before_commit:2",
    "go_back.after_commit:2",
    "go_back.before_commit:3",
    "go_back.after_commit:3",
)
"""Later passes of a crash point.

They are between two checkpoints, at a prune that deletes a checkpoint, or after the engine's second
start."""


async def test_a_run_without_a_crash_passes_every_label_and_keeps_the_invariants(
    fork_server: ForkServer, run_dir: Path
) -> None:
    """The list of labels is read from the server's source."""
    fork_server.run_to_end(run_dir)
    assert set(all_labels()) == set(passed_labels(run_dir))
    await check_all(run_dir)


@pytest.mark.parametrize("label", [*all_labels(), *LATER])
async def test_nothing_is_lost_or_done_twice_by_a_crash(
    fork_server: ForkServer, run_dir: Path, label: str
) -> None:
    await _survive(fork_server, run_dir, label)


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
        (
            "go_back.restored",
            "go_back.before_commit",
            "go_back.after_commit",
            "roll_back.after_commit",
        ),
    ],
    ids=" ".join,
)
async def test_nor_by_a_crash_of_the_recovery(
    fork_server: ForkServer, run_dir: Path, labels: tuple[str, ...]
) -> None:
    await _survive(fork_server, run_dir, *labels)


@pytest.mark.parametrize("label", [*training_labels(), *LATER])
async def test_nothing_is_lost_or_done_twice_by_a_crash_while_groups_are_collected_ahead(
    fork_server: ForkServer, run_dir: Path, label: str
) -> None:
    await _survive(fork_server, run_dir, label, async_steps=2)


async def _survive(
    fork_server: ForkServer, run_dir: Path, *labels: str, async_steps: int = 0
) -> None:
    for label in labels:
        fork_server.run_to_crash(run_dir, label, async_steps=async_steps)
        check_after_crash(run_dir)
    await finish_and_check(fork_server, run_dir, async_steps=async_steps)
