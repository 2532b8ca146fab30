"""Choose the lines that show a demo's progress if its output is not a terminal."""

from __future__ import annotations

from statistics import fmean

from fakevllm.demo.view import Snapshot

NUM_PARTS = 10
"""Number of equal parts of the training. A line is printed at the end of each part."""
NUM_LATEST = 5
"""Number of steps whose mean reward a line shows."""


class ProgressLines:
    """The source of the progress lines for one run of the demo. Each line appears once."""

    def __init__(self) -> None:
        self._phase = ""
        self._part = 0
        self._seen: set[str] = set()
        """Notes that were shown."""

    def next(self, snapshot: Snapshot) -> list[str]:
        """Return the lines that were not shown yet: the name of a new phase, a line about a
        finished part of the training, and new notes."""
        return [*self._new_phase(snapshot), *self._new_part(snapshot), *self._new_notes(snapshot)]

    def _new_phase(self, snapshot: Snapshot) -> list[str]:
        phase = snapshot.phase.partition(": ")[0]  # a number that counts up follows the colon
        if phase in ("", self._phase):
            return []
        self._phase = phase
        return [phase]

    def _new_part(self, snapshot: Snapshot) -> list[str]:
        num_done = snapshot.num_done
        part = num_done * NUM_PARTS // max(snapshot.num_steps, 1)
        if part <= self._part:
            return []
        self._part = part
        latest = snapshot.policy_mean[-NUM_LATEST:]
        reward = f", mean reward of the latest steps {fmean(latest):.2f}" if latest else ""
        return [f"step {num_done} of {snapshot.num_steps}{reward}"]

    def _new_notes(self, snapshot: Snapshot) -> list[str]:
        new = [note for note in dict.fromkeys(snapshot.notes) if note not in self._seen]
        self._seen.update(new)
        return new
