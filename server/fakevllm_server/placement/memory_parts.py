"""Parts of a GPU's memory, and how they add up.

Some parts are held all the time. The others are held only in a phase. Two phases
never overlap, so only the largest phase counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Phase = Literal["always", "sampling", "passes", "update", "export"]
"""When a part is held: always, or while vLLM samples and nothing trains, in the forward and
backward passes of a training step, in the optimizer's update, or in the export of new weights."""
GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A part of the memory of one GPU."""

    name: str
    num_bytes: int
    formula: str
    """The arithmetic behind `num_bytes`, for people."""
    phase: Phase = "always"


def bytes_held(parts: Iterable[MemoryPart], phase: Phase) -> int:
    """Return the bytes of the parts that are held in `phase` only. For `always`, these are the
    parts that are held all the time."""
    return sum(part.num_bytes for part in parts if part.phase == phase)


def largest_phase(parts: Sequence[MemoryPart]) -> Phase:
    """Return the phase that needs the most memory."""
    phases: tuple[Phase, ...] = ("passes", "update", "export", "sampling")
    return max(phases, key=lambda phase: bytes_held(parts, phase))


def peak_bytes(parts: Sequence[MemoryPart]) -> int:
    """Return the largest number of bytes that are held at the same time."""
    return bytes_held(parts, "always") + bytes_held(parts, largest_phase(parts))


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
