"""What sharing prefixes saves a training step: time and peak memory of forward and backward, by
shape of the traffic and by way through the model.

    python -m benchmarks.forest [--rounds 3] [--ways naive,chains] [--write]

All ways train the same calls of the same model, in turns, so that they see the same machine; the
gradients are compared before any time is taken. Time is the CPU's, of one thread, the least of the
rounds; memory is the process's peak above what it held before (Linux only).
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.results import conditions, markdown_table, replace_section
from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.forest import CallTokens, pack, plant

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
attentions: Any = import_module("fakevllm_server.backends.torch_forest.attentions")
plans: Any = import_module("fakevllm_server.backends.torch_forest.plan")
forwards: Any = import_module("fakevllm_server.backends.torch_forest.forward")

TITLE = "forest"
BUDGET = TrainJob().micro_batch_tokens
"""Padded tokens or nodes of one piece, whatever the way."""
VOCAB = 512
TOLERANCE = 1e-4
"""Of the gradients' norm, in float32."""


class Shape(NamedTuple):
    """An app's session: each turn N siblings answer, the first one goes on."""

    prompt: int
    response: int
    siblings: int
    turns: int = 1
    observed: int = 0
    """Tokens between turns."""

    @property
    def name(self) -> str:
        turns = f" T{self.turns} O{self.observed}" if self.turns > 1 else ""
        return f"P{self.prompt} R{self.response} N{self.siblings}{turns}"


SHAPES = [
    Shape(32, 512, 8),
    Shape(64, 512, 8),
    Shape(64, 64, 8),
    Shape(512, 512, 8),
    Shape(256, 32, 8),
    Shape(1024, 32, 8),
    Shape(256, 32, 1, 8, 32),
    Shape(256, 32, 8, 6, 32),
]


@dataclass(slots=True)
class Sample:
    cpu_s: float = float("inf")
    peak_mb: float = 0.0


@dataclass(slots=True)
class Measured:
    shape: Shape
    rho: float
    samples: dict[str, Sample] = field(default_factory=dict[str, Sample])


def session(shape: Shape) -> list[CallTokens]:
    """Its root key is the timeline a call would be merged into where only turns are."""
    drawn = random.Random(0)

    def some(number: int) -> list[int]:
        return [drawn.randrange(VOCAB) for _ in range(number)]

    calls: list[CallTokens] = []
    prompt = some(shape.prompt)
    for turn in range(shape.turns):
        answers = [some(shape.response) for _ in range(shape.siblings)]
        for index, answer in enumerate(answers):
            calls.append(CallTokens.of(prompt, answer, (turn, index) if index else "winner"))
        prompt = [*prompt, *answers[0], *some(shape.observed)]
    return calls


def naive(model: Any, calls: Sequence[CallTokens]) -> None:
    """Rows of like lengths, padded, as trainers without a forest do it."""
    for piece in _padded_pieces(calls):
        longest = max(len(call.ids) for call in piece)
        first = min(call.trained[0][0] for call in piece) - 1
        ids = torch.zeros(len(piece), longest, dtype=torch.long)
        mask = torch.zeros(len(piece), longest - 1)
        for row, call in enumerate(piece):
            ids[row, : len(call.ids)] = torch.tensor(list(call.ids))
            for start, end in call.trained:
                mask[row, start - 1 : end - 1] = 1
        kept = longest - first
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[:, :-1]
        chosen = logits.gather(2, ids[:, first + 1 :, None])[:, :, 0] - logits.logsumexp(-1)
        (chosen * mask[:, first:]).sum().backward()


def _padded_pieces(calls: Sequence[CallTokens]) -> list[list[CallTokens]]:
    pieces: list[list[CallTokens]] = []
    for call in sorted(calls, key=lambda call: -len(call.ids)):
        if pieces and len(pieces[-1][0].ids) * (len(pieces[-1]) + 1) <= BUDGET:
            pieces[-1].append(call)
        else:
            pieces.append([call])
    return pieces


def merged(attention: str, *, turns_only: bool = False) -> Callable[[Any, list[CallTokens]], None]:
    def train(model: Any, calls: list[CallTokens]) -> None:
        keyed = calls if turns_only else [replace(call, root=None) for call in calls]
        for piece in pack(keyed, BUDGET):
            plan = plans.Plan.of(piece.forest)
            way = attentions.quickest(plan, "chains") if attention == "quickest" else attention
            plan.flat(forwards.edge_log_probs(model, plan, way)).sum().backward()

    return train


WAYS: dict[str, Callable[[Any, list[CallTokens]], None]] = {
    "naive": naive,
    "turns only": merged("chains", turns_only=True),
    "dense": merged("dense"),
    "segments": merged("segments"),
    "chains": merged("chains"),
    "quickest": merged("quickest"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS), help="The first is the yardstick.")
    parser.add_argument("--write", action="store_true", help="Put the table into RESULTS.md.")
    args = parser.parse_args()
    told = conditions()
    torch.set_num_threads(1)
    ways = args.ways.split(",")
    model = make_model()
    measured = [_measure(model, shape, ways, args.rounds) for shape in track(SHAPES, "measuring")]
    header, rows = _table(measured)
    table = Table(
        *header, title="forward and backward: times as fast as the first, CPU time, peak memory"
    )
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)
    if args.write:
        replace_section(TITLE, f"{told}\n{markdown_table(header, rows)}\n{_reading()}")


def make_model() -> Any:
    """Random weights; a pair of tokens costs it a thousandth of a token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    return transformers.LlamaForCausalLM(config).eval()


def _measure(model: Any, shape: Shape, ways: Sequence[str], num_rounds: int) -> Measured:
    calls = session(shape)
    measured = Measured(shape, plant([replace(call, root=None) for call in calls]).rho)
    expected: Any = None
    for number, way in _turns(ways, num_rounds):
        model.zero_grad(set_to_none=True)
        before = _reset_peak()
        started = time.process_time()
        WAYS[way](model, calls)
        spent = time.process_time() - started
        if number == 0:
            # Its kernels and buffers are warm from here on.
            gradient = torch.cat([weight.grad.flatten() for weight in model.parameters()])
            expected = gradient if expected is None else expected
            off = ((gradient - expected).norm() / expected.norm()).item()
            assert off < TOLERANCE, f"{way} trains something else on {shape.name}: {off:.1e}"
            measured.samples[way] = Sample()
            continue
        sample = measured.samples[way]
        sample.cpu_s = min(sample.cpu_s, spent)
        sample.peak_mb = max(sample.peak_mb, _status("VmHWM") - before)
    return measured


def _turns(ways: Sequence[str], num_rounds: int) -> Iterator[tuple[int, str]]:
    return ((number, way) for number in range(num_rounds + 1) for way in ways)


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


def _table(measured: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    header = ["shape", "rho", *measured[0].samples]
    rows: list[list[str]] = []
    for one in measured:
        yardstick = next(iter(one.samples.values())).cpu_s
        cells = [
            f"{yardstick / sample.cpu_s:.2f}x, {sample.cpu_s:.2f} s, {sample.peak_mb:.0f} MB"
            for sample in one.samples.values()
        ]
        rows.append([one.shape.name, f"{one.rho:.2f}", *cells])
    return header, rows


def _reading() -> str:
    return (
        f"P prompt, R response, O observed tokens, N siblings, T turns. Pieces of at most {BUDGET} "
        "tokens. `naive` lays calls out one by one, `turns only` merges each timeline but no "
        "siblings, the others merge all and differ in how attention runs; `quickest` is chains, "
        "or rows where next to nothing is shared."
    )


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        sys.exit("benchmarks.forest reads /proc and asks glibc: it runs on Linux only.")
    main()
