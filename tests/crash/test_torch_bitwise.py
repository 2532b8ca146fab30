"""V8: a run that was killed and continued ends with bitwise the same weights as one without a kill.

The tests use real torch on the CPU: AdamW with weight decay, two epochs per step.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.crash_labels import training_labels
from crash.fork_server import ForkServer, passed_labels

LAST, BEFORE = "step-00000007", "step-00000006"
FILES = ["optimizer.safetensors", "state.json", "weights.safetensors"]
ONCE = ("save.before_commit", "save.after_commit")
"""Labels that are passed only when the engine stops."""
AT_A_RESTART = ("roll_back.after_commit", "roll_back.before_commit")
"""Labels that are passed only at a restart."""


class Uninterrupted:
    """The run without a crash, and a method that makes the same run with crashes."""

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        self._fork_server = fork_server
        self._model = str(folder / "model")
        self.run_dir = folder / "uninterrupted"
        assert fork_server.run(folder, model=self._model, only_make_model=True) == 0
        self.run_with_crashes(self.run_dir)
        self.checkpoint = read_checkpoint(self.run_dir)

    def run_with_crashes(self, run_dir: Path, *labels: str) -> None:
        for label in labels:
            self._fork_server.run_to_crash(run_dir, label, model=self._model)
        self._fork_server.run_to_end(run_dir, model=self._model)


def read_checkpoint(run_dir: Path, name: str = LAST) -> dict[str, bytes]:
    files = sorted((run_dir / "checkpoints" / name).iterdir())
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uninterrupted]:
    with ForkServer("crash.torch_server_process") as fork_server:
        yield Uninterrupted(fork_server, tmp_path_factory.mktemp("torch"))


def test_every_label_of_the_training_path_is_passed(uninterrupted: Uninterrupted) -> None:
    passed = {label for label in passed_labels(uninterrupted.run_dir) if label in training_labels()}
    assert set(training_labels()) - passed == set(AT_A_RESTART)


def test_each_step_moves_weights_and_moments(uninterrupted: Uninterrupted) -> None:
    """Otherwise the test below would compare files that no step changes."""
    after = uninterrupted.checkpoint
    assert list(after) == FILES
    before = read_checkpoint(uninterrupted.run_dir, BEFORE)
    assert all(before[name] != after[name] for name in FILES if name != "state.json")


@pytest.mark.parametrize("label", training_labels())
def test_a_crash_changes_no_bit(uninterrupted: Uninterrupted, run_dir: Path, label: str) -> None:
    """The first crash is after a checkpoint, and the second is in the next process."""
    if label in AT_A_RESTART:
        crashes = ["train.after_commit:3", label]
    elif label in ONCE:
        crashes = ["train.updated:3", label]
    else:
        crashes = [f"{label}:3", "train.updated"]
    uninterrupted.run_with_crashes(run_dir, *crashes)
    assert read_checkpoint(run_dir) == uninterrupted.checkpoint
