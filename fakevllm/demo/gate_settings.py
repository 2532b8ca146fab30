"""The settings of a demo with the mode `gated`, and the planted steps of such a demo. A planted
step trains with inverted rewards, which makes the weights worse."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

HELD_OUT_FILE = "held_out.jsonl"
"""Name of the file with the held-out rows in the run folder."""
PLANTED_FILE = "planted.json"
"""Name of the file in the run folder with the times at which planted steps began and ended."""
MARGIN = 0.1
"""Acceptable loss of mean reward. With this margin, an evaluation takes about 100 pairs of answered
rows. With the default margin, it would take about 400 pairs, and the demo is too short for 400
pairs."""
NUM_PLANTED = 10
"""Number of planted steps."""


def release_section(folder: Path) -> dict[str, object]:
    """Return the section `[release]` of the demo's fakevllm.toml."""
    return {
        "mode": "gated",
        "eval_dataset": str(folder.absolute() / HELD_OUT_FILE),
        "canary_share": 0.5,
        "baseline_share": 0.1,
        "evaluate_every": 5,
        "eval_samples": 4,
        "margin": MARGIN,
        "max_samples": 480,
    }


@dataclass(frozen=True, slots=True)
class PlantedSteps:
    """The steps whose rewards reach the trainer with the opposite sign.

    A step is identified by the version of the weights with which it begins. Training may return to
    earlier weights and repeat a step. Version numbers are never reused, so the repeated step has
    another version, and its rewards are correct.

    >>> planted = PlantedSteps(first_step=40)
    >>> planted.begins_at, planted.ends_at, planted.environment
    (39, 49, {'FAKEVLLM_INVERT_REWARDS': '39:48'})
    """

    first_step: int

    @property
    def begins_at(self) -> int:
        """Version of the weights with which the first step with inverted rewards begins."""
        return self.first_step - 1

    @property
    def ends_at(self) -> int:
        """Version of the weights after the last step with inverted rewards."""
        return self.begins_at + NUM_PLANTED

    @property
    def environment(self) -> dict[str, str]:
        """The environment variable that makes the server invert the rewards of these steps, as a
        dict from name to value."""
        return {"FAKEVLLM_INVERT_REWARDS": f"{self.begins_at}:{self.ends_at - 1}"}
