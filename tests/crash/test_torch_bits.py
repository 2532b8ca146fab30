"""V8: a run that was killed and went on ends with the same weights, bit by bit, as one that was
not. Real torch on the CPU: AdamW with weight decay, two epochs a step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.labels import training_labels
from crash.nursery import Nursery, labels_of

LAST, BEFORE = "step-00000007", "step-00000006"
FILES = ["optimizer.safetensors", "state.json", "weights.safetensors"]
ONCE = ("save.before_commit", "save.after_commit")
"""At the stop alone."""
AT_A_RESTART = ("roll_back.after_commit", "roll_back.before_commit")


class Straight:
    """The run without a crash, and what makes others like it."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self._nursery = nursery
        self._model = str(folder / "model")
        self.run_dir = folder / "straight"
        assert nursery.live(folder, model=self._model, makes=True) == 0
        self.finish(self.run_dir)
        self.saved = saved(self.run_dir)

    def finish(self, run_dir: Path, *crashes_at: str) -> None:
        for crash_at in crashes_at:
            self._nursery.crash(run_dir, crash_at, model=self._model)
        self._nursery.finish(run_dir, model=self._model)


def saved(run_dir: Path, name: str = LAST) -> dict[str, bytes]:
    files = sorted((run_dir / "checkpoints" / name).iterdir())
    return {file.name: file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Straight]:
    with Nursery("crash.torch_life") as nursery:
        yield Straight(nursery, tmp_path_factory.mktemp("torch"))


def test_every_label_of_the_training_path_is_passed(straight: Straight) -> None:
    passed = {label for label in labels_of(straight.run_dir) if label in training_labels()}
    assert set(training_labels()) - passed == set(AT_A_RESTART)


def test_each_step_moves_weights_and_moments(straight: Straight) -> None:
    """Else the test below would compare what nothing changes."""
    assert list(straight.saved) == FILES
    before = saved(straight.run_dir, BEFORE)
    assert all(before[name] != straight.saved[name] for name in FILES if name != "state.json")


@pytest.mark.parametrize("label", training_labels())
def test_a_crash_changes_no_bit(straight: Straight, run_dir: Path, label: str) -> None:
    """One crash late enough that something has been saved, and one more in the next life."""
    if label in AT_A_RESTART:
        crashes = ["train.after_commit:3", label]
    elif label in ONCE:
        crashes = ["train.updated:3", label]
    else:
        crashes = [f"{label}:3", "train.updated"]
    straight.finish(run_dir, *crashes)
    assert saved(run_dir) == straight.saved
