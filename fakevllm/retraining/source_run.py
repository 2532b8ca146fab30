"""Find the run whose groups (requests with their sampled answers) are trained again, and export one
version of the run's weights. The run is read from a server's run directory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fakevllm.errors import UserError

MAX_LISTED = 10
"""Number of versions that an error message lists."""


@dataclass(frozen=True, slots=True)
class RunModel:
    """The model of a run, as the file `model.json` names it."""

    name: str | None
    """Folder or hub name of the model; None for the fake engine."""
    fingerprint: str | None

    @staticmethod
    def read(run_dir: Path) -> RunModel | None:
        """Read the model of a run from `model.json` in the run's folder. Return None if this file
        does not exist or cannot be read."""
        try:
            recorded = json.loads((run_dir / "model.json").read_bytes())
            return RunModel(recorded["model"], recorded["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def label(self) -> str:
        """The model's name with its fingerprint, for messages."""
        if self.name is None:
            return "the fake engine"
        is_same = self.fingerprint == self.name
        return f"the model {self.name}" + ("" if is_same else f" (fingerprint {self.fingerprint})")


@dataclass(frozen=True, slots=True)
class SourceRun:
    """The server's run that sampled the groups which are now trained again."""

    folder: Path
    """Run directory of the server."""

    @staticmethod
    def find(run_dir: Path, run_ids: Iterable[str | None]) -> SourceRun:
        """Return the run that sampled more of the given groups than any other run in a server's run
        directory. `run_ids` has one element for each group: the id of the group's run, or None if
        the run is unknown.

        One run has the run directory itself as its folder. The other runs have folders of their own
        below `runs`. If no run sampled any of the groups, the run in the run directory itself is
        returned.
        """
        num_groups = Counter(run_ids)
        runs = [SourceRun(folder) for folder in (run_dir, *sorted(run_dir.glob("runs/*")))]
        return max(runs, key=lambda run: num_groups[run.run_id] if run.run_id else 0)

    @property
    def run_id(self) -> str | None:
        """Id of the run, or None if the folder is no run directory of a server."""
        file = self.folder / "run_id"
        try:
            return file.read_text() if file.is_file() else None
        except (OSError, ValueError):
            return None

    @property
    def model(self) -> RunModel | None:
        return RunModel.read(self.folder)

    def check_same_model(self, used: RunModel | None) -> None:
        """Raise UserError if the run has another model than `used`. If one of the two models is
        unknown, do nothing."""
        own = self.model
        if own is None or used is None or own.fingerprint == used.fingerprint:
            return
        if None in (own.name, used.name):
            remedy = "choose its engines with --backend"
        else:
            remedy = "name the first one with --model"
        raise UserError(
            f"The groups were sampled by {own.label}, and their tokens and log-probabilities do "
            f"not fit {used.label}: {remedy}."
        )

    def export(
        self, version: int, target: Path, model: str | None, *, allow_hub: bool = False
    ) -> None:
        """Write the weights of a version to the model folder `target`. If the run's model was
        moved, `model` is its present folder. With `allow_hub`, `model` may also be a model name on
        the Hugging Face hub. Raises UserError if the run has no checkpoint of the version."""
        flags = ["--run-dir", str(self.folder)]
        listed = _checkpoints("list", "--json", *flags)
        steps = {row["version"]: row["step"] for row in json.loads(listed)}
        if version not in steps:
            known = ", ".join(map(str, sorted(steps)[-MAX_LISTED:])) or "none"
            raise UserError(
                f"{self.folder} has no checkpoint of version {version}: pass --from with one of "
                f"these versions: {known}. Another run directory is named with --server-run-dir."
            )
        flags += [] if model is None else ["--model", model]
        flags += ["--allow-hub"] if allow_hub else []
        _checkpoints("export", str(steps[version]), str(target), *flags)


def _checkpoints(*arguments: str) -> str:
    """Run `fakevllm-server checkpoints`, and return its output. Raises UserError on a failure."""
    command: Sequence[str] = [sys.executable, "-m", "fakevllm_server", "checkpoints", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise UserError(one_line(done.stderr) or f"exit code {done.returncode}")
    return done.stdout


def one_line(stderr: str) -> str:
    """Return the error message of `fakevllm-server` as one line. The message of a trainer may have
    several lines, and the first one has the cause.

    >>> one_line("fakevllm-server: It needs a GPU.\\n  Use --model.\\n")
    'It needs a GPU. Use --model.'
    """
    lines = (line.strip().removeprefix("fakevllm-server: ") for line in stderr.splitlines())
    return " ".join(filter(None, lines))
