"""The tracked figures. Each measurement gives one or more ratios to floors of the same run.

The figure for learning is the mean reward at the end of a training run, divided by the mean reward
at the end of its frozen control.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.learning_runs import CONTROLS, LearningRun
from benchmarks.track_parts.history import Better

FROZEN = "the frozen control"
LEARNING_STEPS = 60
"""Number of training steps on sums in a tracked run. After these steps, the reward is far above the
reward of the control."""


class Skipped(Exception):
    """Raised if a measurement cannot be made on this machine. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One benchmark, and the figures that it gives."""

    floors: Mapping[str, str]
    """The floor of each figure, by the figure's name."""
    measure: Callable[[bool], Mapping[str, float]]
    """Function of `is_quick` that returns the ratio of each figure. Raises Skipped."""
    better: Better = "lower"
    is_in_quick_part: bool = False
    """Whether `.ci/run` makes this measurement."""


def measure_proxy(is_quick: bool) -> Mapping[str, float]:
    """Return two kinds of ratios of CPU times: the proxy to a bare relay, and a group of eight
    siblings to a single answer."""
    if not sys.platform.startswith("linux"):
        raise Skipped("it reads /proc, so it needs Linux")
    from benchmarks.proxy_overhead import Settings, measure
    from benchmarks.proxy_parts.cpu_grid import Plan

    num_rounds, round_s = (3, 0.3) if is_quick else (5, 1.0)
    found = measure(Settings((8,), Plan(("1 KB",), num_rounds, round_s), num_alone=0))
    return {
        "hop, whole": found.x_relay(streamed=False),
        "hop, streamed": found.x_relay(streamed=True),
        "fan-out, N=8": found.x_single(8, size="1 KB", streamed=False),
    }


def _measure_embedded(name: str, function: str) -> Callable[[bool], Mapping[str, float]]:
    """Return the measurement of one function of `embedded_speed`."""

    def measure(is_quick: bool) -> Mapping[str, float]:
        _require("torch", "transformers")
        from benchmarks.track_parts import embedded_speed

        return {name: getattr(embedded_speed, function)(3 if is_quick else 5)}

    return measure


def _learning(name: str, run: Callable[[Path, str], LearningRun], *needed: str) -> Measurement:
    """Return the measurement of a benchmark of learning. `run` takes a folder and the control."""

    def measure(_: bool) -> Mapping[str, float]:
        _require("torch", "transformers", *needed)
        with tempfile.TemporaryDirectory(prefix="fakevllm-") as folder:
            trained, frozen = (run(Path(folder) / control, control) for control in CONTROLS)
        return {name: trained.end / frozen.end}

    return Measurement({name: FROZEN}, measure, "higher")


def _require(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise Skipped(f"the package {package} is not installed")


def _run_sums(backend: str) -> Callable[[Path, str], LearningRun]:
    def run(folder: Path, control: str) -> LearningRun:
        from benchmarks import demo_learning

        arguments = ["--backend", backend, "--steps", str(LEARNING_STEPS)]
        return demo_learning.run(folder, 0, control, arguments)

    return run


def _run_gsm8k(folder: Path, control: str) -> LearningRun:
    from benchmarks import gsm8k_format

    if not gsm8k_format.DATA.exists():
        raise Skipped(f"there is no file {gsm8k_format.DATA.name} of GSM8K")
    return gsm8k_format.run(folder, 0, control)


def _run_math(folder: Path, control: str) -> LearningRun:
    from benchmarks import math_example

    return math_example.run(folder, 0, control)


def _run_opencode(folder: Path, control: str) -> LearningRun:
    from benchmarks import opencode_sessions

    if (command := shutil.which("opencode")) is None:
        raise Skipped("the command opencode is not installed")
    model = folder.parent / "agent-tiny"
    if not model.exists():
        opencode_sessions.make_model(model, command)
    return opencode_sessions.run(folder, model, command, seed=0, control=control)


def _run_werewolves(folder: Path, control: str) -> LearningRun:
    from benchmarks import werewolves

    return werewolves.run(folder, 0, control)


MEASUREMENTS: dict[str, Measurement] = {
    "proxy": Measurement(
        {
            "hop, whole": "the CPU of a bare relay",
            "hop, streamed": "the CPU of a bare relay",
            "fan-out, N=8": "the CPU of one answer",
        },
        measure_proxy,
        is_in_quick_part=True,
    ),
    "decode": Measurement(
        {"decode": "a loop by hand"},
        _measure_embedded("decode", "decode_ratio"),
        is_in_quick_part=True,
    ),
    "step": Measurement(
        {"step": "padded rows by hand"},
        _measure_embedded("step", "step_ratio"),
        is_in_quick_part=True,
    ),
    "forest": Measurement(
        {"forest": "padded rows"},
        _measure_embedded("forest", "forest_ratio"),
        is_in_quick_part=True,
    ),
    "sums-embedded": _learning("sums, embedded", _run_sums("embedded")),
    "sums-vllm": _learning("sums, vLLM", _run_sums("vllm"), "vllm"),
    "sums-verl": _learning("sums, verl", _run_sums("verl"), "vllm", "verl"),
    "gsm8k": _learning("GSM8K format, embedded", _run_gsm8k),
    "math": _learning("math, embedded", _run_math),
    "opencode": _learning("opencode, embedded", _run_opencode),
    "werewolves": _learning("werewolves, embedded", _run_werewolves),
}
"""The measurements by the name that `--only` takes."""
