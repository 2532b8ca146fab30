"""What sharing prefixes saves a training step on a GPU, and how exact it is there.

    python -m benchmarks.forest_gpu [--models 0.5B,7B] [--rounds 5] [--write]   # needs CUDA
    python -m benchmarks.forest_gpu --device cpu        # the same over a tiny model, Linux only

Random models of real shapes compute as the trainer does: float32 weights, bfloat16 on CUDA. Before
any time is taken, each way's log-probabilities and its gradient of the first layer are held against
naive rows; the yardstick is what naive rows and calls one at a time differ by, which is rounding
alone. Time is that of the wall, synchronised, median over rounds in turns; memory is the
allocator's peak above what was held before. On a CPU both are as in benchmarks.forest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.forest_parts.cases import BUDGET, SHAPES, VOCAB, Case
from benchmarks.forest_parts.measurement import (
    Measured,
    Meter,
    Sample,
    gradient_of,
    relative_difference,
    take_turns,
)
from benchmarks.forest_parts.variants import Pass, alone, merged, naive, trained
from benchmarks.results import conditions, markdown_table, replace_section

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
placement: Any = import_module("fakevllm_server.backends.embedded.device_and_dtype")
precision: Any = import_module("fakevllm_server.backends.torch_forest.precision")

TITLE = "forest, on a GPU"
TIMES_THE_NOISE = 3.0
"""What merging may differ by, as a multiple of what naive rows and single calls differ by."""
EXACT = 1e-6
"""A mean difference of log-probabilities that is no difference, where there is no noise."""
WAYS: dict[str, Pass] = {
    "naive": naive,
    "dense": merged("dense"),
    "segments": merged("segments"),
    "flex": merged("flex"),
}


class Size(NamedTuple):
    """Of a Qwen2."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    checkpointed: bool = False
    """Whether layers are computed again in the backward pass, for memory."""


SIZES = {
    "tiny": Size(64, 128, 2, 4, 2, VOCAB, tied=True),
    "0.5B": Size(896, 4864, 24, 14, 2, 151936, tied=True),
    "7B": Size(3584, 18944, 28, 28, 4, 152064, tied=False, checkpointed=True),
}


class DeviceMeter:
    """Adds what is spent inside of it on a CUDA device to a sample."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._before = self._started = 0.0

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        torch.cuda.synchronize()
        self._sample.cpu_s.append(time.perf_counter() - self._started)
        peak = (torch.cuda.max_memory_allocated() - self._before) / 2**20
        self._sample.peak_mb = max(self._sample.peak_mb, peak)


class Off(NamedTuple):
    """How far one way is from naive rows."""

    mean: float
    """Of the absolute differences of log-probabilities."""
    largest: float
    gradient: float
    """Of the first layer, as a part of its norm: all of the backward pass ends there."""


@dataclass(slots=True)
class Found:
    model: str
    measured: Measured
    noise: Off
    """Of calls one at a time."""
    off: dict[str, Off] = field(default_factory=dict[str, Off])
    """By way, but for naive rows themselves."""

    def missed(self) -> list[str]:
        limit = max(TIMES_THE_NOISE * self.noise.mean, EXACT)
        return [
            f"{self.model}, {self.measured.case.name}: {way} is off by {off.mean:.1e}, "
            f"above {limit:.1e}"
            for way, off in self.off.items()
            if not off.mean <= limit
        ]

    def row(self) -> list[str]:
        case = self.measured.case
        cells = [self._cell(way) for way in self.measured.samples]
        noise = f"{self.noise.mean:.1e}, {self.noise.largest:.1e}, {self.noise.gradient:.0e}"
        return [self.model, case.name, f"{case.rho:.2f}", noise, *cells]

    def _cell(self, way: str) -> str:
        sample = self.measured.samples[way]
        spent = f"{self.measured.speed(way):.2f}x, {sample.median_s:.3f} s, {sample.peak_mb:.0f} MB"
        off = self.off.get(way)
        if off is None:
            return spent
        return f"{spent}; off {off.mean:.1e}, {off.largest:.1e}, {off.gradient:.0e}"


def main() -> int:
    """The exit code: 1 where a way differs by more than rounding does."""
    args = _arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.forest_gpu: torch finds no CUDA GPU here. `--device cpu` runs the same "
            "over a tiny model.",
            file=sys.stderr,
        )
        return 2
    if args.device == "cpu":
        torch.set_num_threads(1)
    told = conditions() + _device_told(args.device)
    found: list[Found] = []
    for name in args.models.split(","):
        model = make_model(SIZES[name], args.device)
        ways = {way: WAYS[way] for way in args.ways.split(",")}
        for shape in SHAPES:
            found.append(look_at(name, model, shape.case(), ways, args.rounds))
            print(" | ".join(found[-1].row()), file=sys.stderr, flush=True)
        del model
    _show(found, told, write=args.write)
    return 1 if any(one.missed() for one in found) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--models", help=f"Of {', '.join(SIZES)}; 0.5B,7B on a GPU, else tiny.")
    parser.add_argument("--ways", help="Beside naive rows, which are the yardstick.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="Put the table into RESULTS.md.")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.models = args.models or ("0.5B,7B" if on_gpu else "tiny")
    args.ways = ",".join(dict.fromkeys(["naive", *(args.ways or _ways_on(on_gpu)).split(",")]))
    for asked, known in ((args.models, SIZES), (args.ways, WAYS)):
        if unknown := set(asked.split(",")) - known.keys():
            parser.error(f"no {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if not on_gpu and "flex" in args.ways.split(","):
        parser.error("flex has no backward pass on a CPU")
    return args


def _ways_on(gpu: bool) -> str:
    return ",".join(way for way in WAYS if gpu or way != "flex")


def make_model(size: Size, device: str) -> Any:
    """Random weights, that compute as the trainer's do on such a device."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=size.tied,
    )
    with torch.device(device):
        model = transformers.Qwen2ForCausalLM(config)
    if size.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # Layers are computed again in training only; there is no dropout.
    model.train(size.checkpointed)
    precision.set_compute_dtype(model, placement.resolve_dtype("auto", torch.device(device)))
    return model


def look_at(name: str, model: Any, case: Case, ways: Mapping[str, Pass], num_rounds: int) -> Found:
    """`ways` begins with naive rows. Kernels get warm, and flex is compiled, in the comparison."""
    measured = Measured(case, {way: Sample() for way in ways})
    expected = _values(model, case, naive, measured.samples["naive"])
    found = Found(name, measured, _off(_values(model, case, alone, Sample()), expected))
    for way in [way for way in ways if way != "naive"]:
        found.off[way] = _off(_values(model, case, ways[way], measured.samples[way]), expected)
    meter = DeviceMeter if model.device.type == "cuda" else Meter
    take_turns(model, measured, {way: trained(own) for way, own in ways.items()}, num_rounds, meter)
    return found


def _values(model: Any, case: Case, passes: Pass, sample: Sample) -> tuple[Any, Any]:
    """The log-probabilities of all calls in their own order, and the first layer's gradient."""
    model.zero_grad(set_to_none=True)
    rows: dict[int, Any] = {}
    for one in passes(model, case):
        one.log_prob.sum().backward()
        sample.tokens += one.num_tokens
        own = one.log_prob.detach().cpu().split(list(one.num_trained))
        rows.update(zip(one.calls, own, strict=True))
    return torch.cat([rows[number] for number in sorted(rows)]), gradient_of(
        model.get_submodule("model.layers.0")
    )


def _off(found: tuple[Any, Any], expected: tuple[Any, Any]) -> Off:
    apart = (found[0] - expected[0]).abs()
    gradient = relative_difference(found[1], expected[1])
    return Off(apart.mean().item(), apart.max().item(), gradient)


def _device_told(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else "none, on the CPU"
    return f"\nGPU: {name}; torch {torch.__version__}.\n"


def _show(found: Sequence[Found], told: str, *, write: bool) -> None:
    header = ["model", "calls", "rho", "noise", *found[0].measured.samples]
    rows = [one.row() for one in found]
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    missed = [line for one in found for line in one.missed()]
    fastest = statistics.median(
        max(one.measured.speed(way) for way in one.measured.samples) for one in found
    )
    notes = [*missed, f"median over calls of the best way: {fastest:.2f}x"]
    Console(width=200).print(ABOUT, table, *notes, sep="\n")
    if write:
        listed = "\n".join(f"- {note}" for note in notes)
        replace_section(TITLE, "\n".join([told, ABOUT, "", markdown_table(header, rows), listed]))


ABOUT = (
    "Forward and backward: times as fast as naive rows, time, peak memory; then the mean and the "
    "largest difference of a log-probability from naive rows, and that of the first layer's "
    "gradient as a part of its norm. `noise` is the same of calls one at a time, where nothing is "
    f"merged. Pieces of at most {BUDGET} tokens; weights are random."
)


if __name__ == "__main__":
    sys.exit(main())
