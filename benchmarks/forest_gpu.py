"""Measure what sharing prefixes saves in a training step on a GPU, and how exact it is there.

    python -m benchmarks.forest_gpu [--models 0.5B,7B] [--rounds 5] [--write]   # needs CUDA
    python -m benchmarks.forest_gpu --device cpu        # the same over a tiny model, Linux only

The models have random weights and real shapes. They compute as the trainer does: float32 weights,
bfloat16 products on CUDA. Before any time is measured, the log-probabilities of each variant and
its gradient of the first layer are compared with those of naive rows in float32. Naive rows in
bfloat16 differ from them only by rounding, so that difference is the unit of comparison. Time
is wall time with a synchronized device, as the median over rounds, in which the variants take
turns. Memory is the allocator's peak above the memory held before. On a CPU, time and memory are
measured as in benchmarks.forest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.forest_parts.cases import BUDGET, SHAPES, VOCAB, Case
from benchmarks.forest_parts.measurement import (
    Measurement,
    Meter,
    Sample,
    gradient_of,
    relative_difference,
    take_turns,
)
from benchmarks.forest_parts.variants import (
    ForwardPass,
    forest_pass,
    naive,
    with_backward,
)
from benchmarks.results import conditions, markdown_table, replace_section

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
placement: Any = import_module("fakevllm_server.backends.embedded.device_and_dtype")
autocast: Any = import_module("fakevllm_server.backends.torch_forest.autocast")

TITLE = "forest, on a GPU"
MAX_NOISE_RATIO = 3.0
"""Largest difference of a variant from naive rows in float32, as a multiple of the difference that
naive rows in the dtype of the measurement have."""
EXACT = 1e-6
"""Mean difference of log-probabilities that always passes, also if rounding makes no difference."""
FORWARD_PASSES: dict[str, ForwardPass] = {
    "naive": naive,
    "dense": forest_pass("dense"),
    "segments": forest_pass("segments"),
    "flex": forest_pass("flex"),
}


class ModelShape(NamedTuple):
    """Dimensions of a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    checkpointed: bool = False
    """Whether layers are recomputed in the backward pass, which saves memory."""


MODEL_SHAPES = {
    "tiny": ModelShape(64, 128, 2, 4, 2, VOCAB, tied=True),
    "0.5B": ModelShape(896, 4864, 24, 14, 2, 151936, tied=True),
    "7B": ModelShape(3584, 18944, 28, 28, 4, 152064, tied=False, checkpointed=True),
}


class DeviceMeter:
    """A context manager that adds the wall time and the peak CUDA memory of its block to a
    sample."""

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


class Difference(NamedTuple):
    """Difference of one variant from naive rows in float32."""

    mean: float
    """Mean absolute difference of the log-probabilities."""
    largest: float
    """Largest absolute difference of a log-probability."""
    gradient: float
    """Relative difference of the first layer's gradient, where the whole backward pass ends."""


@dataclass(slots=True)
class Result:
    """Measurements and differences of all variants for one model and one case."""

    model: str
    measurement: Measurement
    noise: Difference
    """Difference of naive rows in the dtype of the measurement."""
    differences: dict[str, Difference] = field(default_factory=dict[str, Difference])
    """Difference by variant, without naive rows."""

    def failures(self) -> list[str]:
        """Return a sentence for each variant that differs by more than rounding explains."""
        limit = max(MAX_NOISE_RATIO * self.noise.mean, EXACT)
        return [
            f"{self.model}, {self.measurement.case.name}: {variant} differs by "
            f"{difference.mean:.1e}, more than {limit:.1e}"
            for variant, difference in self.differences.items()
            if not difference.mean <= limit
        ]

    def row(self) -> list[str]:
        """Return the cells of the table's row."""
        case = self.measurement.case
        cells = [self._cell(variant) for variant in self.measurement.samples]
        noise = f"{self.noise.mean:.1e}, {self.noise.largest:.1e}, {self.noise.gradient:.0e}"
        return [self.model, case.name, f"{case.rho:.2f}", noise, *cells]

    def _cell(self, variant: str) -> str:
        sample = self.measurement.samples[variant]
        speed = f"{self.measurement.speed(variant):.2f}x, {sample.median_s:.3f} s"
        cost = f"{speed}, {sample.peak_mb:.0f} MB"
        difference = self.differences.get(variant)
        if difference is None:
            return cost
        mean, largest, gradient = difference
        return f"{cost}; differs by {mean:.1e}, {largest:.1e}, {gradient:.0e}"


def main() -> int:
    """Run the benchmark, and return the exit code.

    It is 1 if a variant differs by more than rounding explains, and 2 if there is no GPU.
    """
    args = _parse_arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.forest_gpu: torch finds no CUDA GPU. Use `--device cpu` to run the same "
            "functions over a tiny model.",
            file=sys.stderr,
        )
        return 2
    if args.device == "cpu":
        torch.set_num_threads(1)
    text = conditions() + _describe_device(args.device)
    results: list[Result] = []
    for name in args.models.split(","):
        model = make_model(MODEL_SHAPES[name], args.device)
        passes = {variant: FORWARD_PASSES[variant] for variant in args.ways.split(",")}
        for shape in SHAPES:
            results.append(measure_case(name, model, shape.create_case(), passes, args.rounds))
            print(" | ".join(results[-1].row()), file=sys.stderr, flush=True)
        del model
    _print_results(results, text, write=args.write)
    return 1 if any(result.failures() for result in results) else 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="where to compute"
    )
    parser.add_argument(
        "--models",
        help=f"models of {', '.join(MODEL_SHAPES)}; by default 0.5B,7B on a GPU, else tiny",
    )
    parser.add_argument("--ways", help="variants to compare with naive rows")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per variant")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    args.models = args.models or ("0.5B,7B" if on_gpu else "tiny")
    args.ways = ",".join(
        dict.fromkeys(["naive", *(args.ways or _default_variants(on_gpu)).split(",")])
    )
    for names, known in ((args.models, MODEL_SHAPES), (args.ways, FORWARD_PASSES)):
        if unknown := set(names.split(",")) - known.keys():
            missing = ", ".join(sorted(unknown))
            parser.error(f"there is no {missing}; choose from {', '.join(known)}")
    if not on_gpu and "flex" in args.ways.split(","):
        parser.error("flex has no backward pass on a CPU; leave it out of --ways")
    return args


def _default_variants(on_gpu: bool) -> str:
    return ",".join(variant for variant in FORWARD_PASSES if on_gpu or variant != "flex")


def make_model(shape: ModelShape, device: str) -> Any:
    """Return a model with random weights that computes as the trainer does on this device."""
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=32768,
        tie_word_embeddings=shape.tied,
    )
    with torch.device(device):
        model = transformers.Qwen2ForCausalLM(config)
    if shape.checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # Checkpointing works only in training mode. The model has no dropout.
    model.train(shape.checkpointed)
    autocast.set_compute_dtype(model, placement.resolve_dtype("auto", torch.device(device)))
    return model


def measure_case(
    name: str, model: Any, case: Case, passes: Mapping[str, ForwardPass], num_rounds: int
) -> Result:
    """Compare all variants with naive rows, then measure them.

    The first entry of `passes` must be "naive". The comparison also warms up kernels, and compiles
    FlexAttention.
    """
    measurement = Measurement(case, {variant: Sample() for variant in passes})
    samples = measurement.samples
    with _in_dtype_of_weights(model):
        expected = _compute_values(model, case, naive, Sample())
    plain = _compute_values(model, case, naive, samples["naive"])
    result = Result(name, measurement, _compare(plain, expected))
    for variant, forward_pass in passes.items():
        if variant != "naive":
            values = _compute_values(model, case, forward_pass, samples[variant])
            result.differences[variant] = _compare(values, expected)
    meter = DeviceMeter if model.device.type == "cuda" else Meter
    variants = {variant: with_backward(own) for variant, own in passes.items()}
    take_turns(model, measurement, variants, num_rounds, meter)
    return result


@contextmanager
def _in_dtype_of_weights(model: Any) -> Generator[None]:
    """Inside the `with` block, the model computes in the dtype of its weights: without the autocast
    that `set_compute_dtype` wraps around the forward passes of its modules."""
    wrapped = [module for module in model.modules() if "forward" in vars(module)]
    forwards = [vars(module).pop("forward") for module in wrapped]
    try:
        yield
    finally:
        for module, forward in zip(wrapped, forwards, strict=True):
            module.forward = forward


def _compute_values(
    model: Any, case: Case, forward_pass: ForwardPass, sample: Sample
) -> tuple[Any, Any]:
    """Return the log-probabilities of all calls in the case's order, and the first layer's
    gradient.

    The number of computed tokens is added to the sample.
    """
    model.zero_grad(set_to_none=True)
    rows: dict[int, Any] = {}
    for result in forward_pass(model, case):
        result.log_prob.sum().backward()
        sample.tokens += result.num_tokens
        by_call = result.log_prob.detach().cpu().split(list(result.num_trained))
        rows.update(zip(result.calls, by_call, strict=True))
    gradient = gradient_of(model.get_submodule("model.layers.0"))
    return torch.cat([rows[index] for index in sorted(rows)]), gradient


def _compare(values: tuple[Any, Any], expected: tuple[Any, Any]) -> Difference:
    distances = (values[0] - expected[0]).abs()
    gradient = relative_difference(values[1], expected[1])
    return Difference(distances.mean().item(), distances.max().item(), gradient)


def _describe_device(device: str) -> str:
    name = torch.cuda.get_device_name() if device == "cuda" else "none, on the CPU"
    return f"\nGPU: {name}; torch {torch.__version__}.\n"


def _print_results(results: Sequence[Result], text: str, *, write: bool) -> None:
    """Print the table, and write it with `text` above it into RESULTS.md if `write` is set."""
    header = ["model", "calls", "rho", "noise", *results[0].measurement.samples]
    rows = [result.row() for result in results]
    table = Table(*header)
    for row in rows:
        table.add_row(*row)
    failures = [line for result in results for line in result.failures()]
    measurements = [result.measurement for result in results]
    fastest = statistics.median(max(map(one.speed, one.samples)) for one in measurements)
    notes = [*failures, f"speed of the fastest variant, median over rows: {fastest:.2f}x"]
    Console(width=200).print(ABOUT, table, *notes, sep="\n")
    if write:
        note_list = "\n".join(f"- {note}" for note in notes)
        replace_section(
            TITLE, "\n".join([text, ABOUT, "", markdown_table(header, rows), note_list])
        )


ABOUT = (
    "Forward and backward pass. Each cell has the speed as a multiple of that of naive rows, the "
    "time, and the peak memory. Then come three differences from naive rows in float32: the mean "
    "and the largest difference of a log-probability, and the relative difference of the first "
    "layer's gradient. `noise` has these three for the naive rows that are measured. Pieces have "
    f"at most {BUDGET} tokens. The weights are random."
)


if __name__ == "__main__":
    sys.exit(main())
