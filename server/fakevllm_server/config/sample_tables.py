"""The settings of the tables of sampled answers in the trackers. The command line imports this
module, so it imports nothing slow."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_EVERY = 10
"""Steps between two tables. A table of each step would be read by nobody, and fill the disk."""


@dataclass(frozen=True, slots=True)
class SampleTableSettings:
    """How often a table of sampled answers is written to the trackers, and how many groups it
    has."""

    num_groups: int = 0
    """Number of groups (requests with their answers) in a table. 0 means that no tables are
    written."""
    every: int = DEFAULT_EVERY
    """A table is written for each step whose number is a multiple of this number."""

    def is_due(self, step: int) -> bool:
        """Return True if a table is written for a step."""
        return self.num_groups > 0 and step % self.every == 0
