"""CPU time and peak memory of some ways to train one case, taken in turns, so that they see the
same machine."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.forest_parts.cases import Case
from benchmarks.forest_parts.variants import Way

torch: Any = import_module("torch")

TOLERANCE = 1e-4
"""Of the gradients' norm, in float32."""


@dataclass(slots=True)
class Sample:
    tokens: int = 0
    """That went through the model."""
    cpu_s: list[float] = field(default_factory=list[float])
    """By round; wall time on a GPU."""
    peak_mb: float = 0.0
    """Above what the process held before."""

    def faster_than(self, other: Sample) -> float:
        """Median over rounds."""
        pairs = zip(other.cpu_s, self.cpu_s, strict=True)
        return statistics.median(theirs / own for theirs, own in pairs)

    @property
    def median_s(self) -> float:
        return statistics.median(self.cpu_s)


class Meter:
    """Adds what is spent inside of it to a sample."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._before = self._started = 0.0

    def __enter__(self) -> None:
        self._before = _reset_peak()
        self._started = time.process_time()

    def __exit__(self, *_: object) -> None:
        self._sample.cpu_s.append(time.process_time() - self._started)
        self._sample.peak_mb = max(self._sample.peak_mb, _status("VmHWM") - self._before)


@dataclass(slots=True)
class Measured:
    case: Case
    samples: dict[str, Sample] = field(default_factory=dict[str, Sample])
    """By way; the first is the yardstick."""

    @property
    def yardstick(self) -> Sample:
        return next(iter(self.samples.values()))

    def speed(self, way: str) -> float:
        return self.samples[way].faster_than(self.yardstick)


def measure(model: Any, case: Case, ways: Mapping[str, Way], num_rounds: int) -> Measured:
    """The gradients are compared in a round of its own, in which kernels and buffers get warm."""
    measured = Measured(case)
    expected: Any = None
    for name, way in ways.items():
        sample = measured.samples[name] = Sample()
        model.zero_grad(set_to_none=True)
        sample.tokens = way(model, case)
        gradient = gradient_of(model)
        expected = gradient if expected is None else expected
        off = relative_difference(gradient, expected)
        assert off < TOLERANCE, f"{name} trains something else on {case.name}: {off:.1e}"
    take_turns(model, measured, ways, num_rounds, Meter)
    return measured


def take_turns(
    model: Any,
    measured: Measured,
    ways: Mapping[str, Way],
    num_rounds: int,
    meter: Callable[[Sample], AbstractContextManager[object]],
) -> None:
    for _ in range(num_rounds):
        for name, way in ways.items():
            model.zero_grad(set_to_none=True)
            with meter(measured.samples[name]):
                way(model, measured.case)


def reckoned_from_one_sibling(model: Any, case: Case, naive: Way, ours: Way) -> Measured:
    """For prompts that take naive rows an hour: one pass over one sibling of each call, times the
    siblings, which are as long; beside ours over all of them."""
    measured = Measured(case, {"naive": Sample(), "quickest": Sample()})
    of_naive, of_ours = measured.samples.values()
    one = case.first_siblings()
    model.zero_grad(set_to_none=True)
    with Meter(of_naive):
        naive(model, one)
    of_naive.cpu_s = [spent * case.num_siblings for spent in of_naive.cpu_s]
    of_naive.tokens = sum(len(call.ids) for call in case.calls)
    model.zero_grad(set_to_none=True)
    with Meter(of_ours):
        of_ours.tokens = ours(model, case)
    return measured


def gradient_of(model: Any) -> Any:
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def relative_difference(one: Any, other: Any) -> float:
    return ((one - other).norm() / other.norm()).item()


def _reset_peak() -> float:
    """The process's memory in MB, which is now its peak too."""
    # What the allocator keeps of the last pass would hide what the next one needs.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(found) / 1024
