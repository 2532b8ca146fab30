"""The sizes of `benchmarks.gpu_learn`: one for a GPU, a small one for a CPU, whose
arms are judged too, and a tiny one that only shows that everything works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu_learn_parts.tasks import Countdown, Sums, TaskKind, ToolCalls


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions of a Qwen3 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


@dataclass(frozen=True, slots=True)
class Pretraining:
    """How the model is trained from nothing."""

    num_steps: int
    """Training ends after this number of steps, or after `limit_s` seconds, whichever comes
    first."""
    limit_s: float
    batch_tokens: int
    """Maximum number of tokens of a step, with padding. All rows of a step are of one kind of
    task."""
    lr: float
    """Highest learning rate."""


@dataclass(frozen=True, slots=True)
class Reinforcement:
    """How an arm trains and is measured. All arms take the same number of steps, and sample the
    same number of answers for each step."""

    num_steps: int
    answers_per_step: int
    lr: float
    rows_per_kind: int
    """Number of questions of each kind of task in the training set."""
    held_out_per_kind: int
    """Number of held-out questions of each kind of task."""
    samples: int
    """Number of answers to each held-out question at temperature 1. One greedy answer is added."""
    concurrency: int
    """Number of requests at the same time."""
    max_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Size:
    kinds: Sequence[TaskKind]
    model: ModelShape
    pretraining: Pretraining
    reinforcement: Reinforcement
    is_judged: bool
    """Whether an arm that did not learn as expected counts as a failure. A run that is too short
    for this only shows that everything works."""


SIZES = {
    "full": Size(
        (Sums(100), Countdown(3, 12), ToolCalls(24)),
        ModelShape(512, 1536, 12, 8, 4, 64, vocab=1024),
        Pretraining(num_steps=1_000_000, limit_s=180.0, batch_tokens=16_384, lr=1e-3),
        Reinforcement(
            num_steps=80,
            answers_per_step=64,
            lr=5e-5,
            rows_per_kind=600,
            held_out_per_kind=80,
            samples=8,
            concurrency=16,
        ),
        is_judged=True,
    ),
    "small": Size(
        (Sums(16), Countdown(2, 14), ToolCalls(8)),
        ModelShape(128, 384, 3, 4, 2, 32, vocab=512),
        Pretraining(num_steps=1500, limit_s=100.0, batch_tokens=1024, lr=3e-3),
        Reinforcement(
            num_steps=30,
            answers_per_step=64,
            lr=4e-4,
            rows_per_kind=150,
            held_out_per_kind=30,
            samples=8,
            concurrency=8,
        ),
        is_judged=True,
    ),
    "tiny": Size(
        (Sums(8), Countdown(2, 6), ToolCalls(4)),
        ModelShape(96, 256, 2, 4, 2, 24, vocab=512),
        Pretraining(num_steps=500, limit_s=60.0, batch_tokens=512, lr=4e-3),
        Reinforcement(
            num_steps=3,
            answers_per_step=32,
            lr=5e-4,
            rows_per_kind=40,
            held_out_per_kind=6,
            samples=2,
            concurrency=8,
        ),
        is_judged=False,
    ),
}
