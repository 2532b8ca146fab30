"""The settings of the tables of sampled answers in the trackers. The command line imports this
module, so it imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass

from fakevllm_runtime.errors import ConfigError

DEFAULT_EVERY = 10
"""Steps between two tables. A table of each step would be read by nobody, and fill the disk."""

MAX_GROUPS = 64
"""Maximum number of groups in a table, which limits the memory of the process that writes it."""
KEEP_CALLS_S = 60.0
"""Seconds for which the journal keeps the calls of a step for the tables. The trackers read the
journal every few seconds, and may have to start first."""


@dataclass(frozen=True, slots=True)
class SampleTableSettings:
    """How often a table of sampled answers is written to the trackers, and how many groups it
    has."""

    num_groups: int = 0
    """Number of groups (requests with their answers) in a table. 0 means that no tables are
    written."""
    every: int = DEFAULT_EVERY
    """A table is written for each step whose number is a multiple of this number."""

    def __post_init__(self) -> None:
        for flag, key, number, least in (
            ("--track-samples", "samples", self.num_groups, 0),
            ("--track-samples-every", "samples_every", self.every, 1),
        ):
            if number < least:
                raise ConfigError(
                    f"{flag} (`{key}` in [tracking]) must be at least {least}, got {number}."
                )
        if self.num_groups > MAX_GROUPS:
            raise ConfigError(
                f"--track-samples (`samples` in [tracking]) must be at most {MAX_GROUPS}, got "
                f"{self.num_groups}."
            )

    @property
    def keep_calls_s(self) -> float:
        """Seconds for which the journal keeps the calls of a step, although no checkpoint needs
        them."""
        return KEEP_CALLS_S if self.num_groups else 0.0

    def is_due(self, step: int) -> bool:
        """Return True if a table is written for a step."""
        return self.num_groups > 0 and step % self.every == 0
