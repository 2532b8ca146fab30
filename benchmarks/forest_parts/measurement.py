"""CPU time and peak memory of training variants on one case.

The variants take turns, so that all run under the same conditions.
"""

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
from benchmarks.forest_parts.variants import Variant

torch: Any = import_module("torch")

TOLERANCE = 1e-4
"""Largest relative difference between the gradients of two variants, in float32."""


@dataclass(slots=True)
class Sample:
    """Measurements of one variant."""

    tokens: int = 0
    """Tokens that went through the model, including padding."""
    cpu_s: list[float] = field(default_factory=list[float])
    """CPU seconds of each round. On a GPU, seconds of wall time instead."""
    peak_mb: float = 0.0
    """Peak memory in MB above the memory held before the round."""

    def faster_than(self, other: Sample) -> float:
        """Return the time of `other` divided by the time of this sample, as the median over the
        rounds."""
        pairs = zip(other.cpu_s, self.cpu_s, strict=True)
        return statistics.median(theirs / own for theirs, own in pairs)

    @property
    def median_s(self) -> float:
        """Median of the rounds' seconds."""
        return statistics.median(self.cpu_s)


class Meter:
    """A context manager that adds the CPU time and the peak memory of its block to a sample."""

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
class Measurement:
    """Samples of several variants on one case."""

    case: Case
    samples: dict[str, Sample] = field(default_factory=dict[str, Sample])
    """Sample by variant. The first is the reference."""

    @property
    def reference(self) -> Sample:
        """Sample with which the others are compared."""
        return next(iter(self.samples.values()))

    def speed(self, variant: str) -> float:
        """Return how many times as fast as the reference the variant is."""
        return self.samples[variant].faster_than(self.reference)


def measure(
    model: Any, case: Case, variants: Mapping[str, Variant], num_rounds: int
) -> Measurement:
    """Compare the gradients of all variants. Then measure the variants.

    The comparison is a round of its own, which also warms up kernels and buffers. Raises
    AssertionError if a gradient differs from that of the first variant by more than TOLERANCE.
    """
    measurement = Measurement(case)
    expected: Any = None
    for name, variant in variants.items():
        sample = measurement.samples[name] = Sample()
        model.zero_grad(set_to_none=True)
        sample.tokens = variant(model, case)
        gradient = gradient_of(model)
        expected = gradient if expected is None else expected
        difference = relative_difference(gradient, expected)
        assert difference < TOLERANCE, (
            f"The gradient of {name} on {case.name} differs by {difference:.1e}."
        )
    take_turns(model, measurement, variants, num_rounds, Meter)
    return measurement


def take_turns(
    model: Any,
    measurement: Measurement,
    variants: Mapping[str, Variant],
    num_rounds: int,
    meter: Callable[[Sample], AbstractContextManager[object]],
) -> None:
    """Measure each variant once per round."""
    for _ in range(num_rounds):
        for name, variant in variants.items():
            model.zero_grad(set_to_none=True)
            with meter(measurement.samples[name]):
                variant(model, measurement.case)


def extrapolate_from_one_sibling(
    model: Any, case: Case, naive: Variant, ours: Variant
) -> Measurement:
    """Measure our variant, and estimate the time of naive rows.

    On long prompts, a whole measurement of naive rows would take an hour. Therefore naive rows are
    measured on only the first sibling of each call. The measured time is multiplied by the number
    of siblings, because all siblings are equally long.
    """
    measurement = Measurement(case, {"naive": Sample(), "quickest": Sample()})
    naive_sample, our_sample = measurement.samples.values()
    first_siblings = case.first_siblings()
    model.zero_grad(set_to_none=True)
    with Meter(naive_sample):
        naive(model, first_siblings)
    naive_sample.cpu_s = [spent * case.num_siblings for spent in naive_sample.cpu_s]
    naive_sample.tokens = sum(len(call.ids) for call in case.calls)
    model.zero_grad(set_to_none=True)
    with Meter(our_sample):
        our_sample.tokens = ours(model, case)
    return measurement


def gradient_of(model: Any) -> Any:
    """Return the gradients of all parameters as one vector."""
    return torch.cat([weight.grad.flatten() for weight in model.parameters()])


def relative_difference(one: Any, other: Any) -> float:
    """Return the norm of the difference, relative to the norm of `other`."""
    return ((one - other).norm() / other.norm()).item()


def _reset_peak() -> float:
    """Reset the process's peak memory, and return its current memory in MB."""
    # Memory that the allocator kept from the last pass would hide what the next pass needs.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    (value,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(value) / 1024
