"""Measure how much faster training is if calls share prefixes.

A piece is a set of calls that go through the model together. To measure the speedup, the calls of
one piece go forward and backward through the model twice. The first time, calls share prefixes. The
second time, calls share nothing, and are split into as many passes as the token budget requires.
The measurement takes as long as training the piece without sharing. Therefore the speedup is
measured at the first step with shared prefixes, and afterwards at most once in `EVERY` steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence

import torch

from fakevllm_server.backends.embedded.train.forward_backward import MAX_LOGITS, Passes
from fakevllm_server.backends.embedded.train.micro_batches import StepPieces, cut_into_pieces
from fakevllm_server.backends.torch_forest.attention.registry import ROWS
from fakevllm_server.backends.torch_forest.edge_log_probs import edge_log_probs
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.types.backend import Call, LossSpec, StepMetrics

log = logging.getLogger("fakevllm.trainer")

EVERY = 100
"""Number of steps from one measurement to the next."""


class SharingSpeedup:
    """The latest measured speedup of training by prefix sharing. With prefix sharing, the common
    prefix of several calls is computed only once."""

    def __init__(self) -> None:
        self.metrics: StepMetrics = {}
        """The metric `forest_speedup`, which is the time of one piece without sharing divided by
        the time with sharing. Empty before the first measurement."""
        self._num_since = EVERY

    def measure(
        self, step: StepPieces, calls: Sequence[Call], passes: Passes, max_tokens: int
    ) -> Generator[None, None, None]:
        """Measure the speedup by prefix sharing, at most once in `EVERY` steps. Call this method
        once per step, after the step's last update. Clear the model's gradients afterwards, because
        the measurement adds to them."""
        self._num_since += 1
        piece = next((one for one in step.pieces if passes.attention_for(one) != ROWS), None)
        if piece is None or self._num_since < EVERY:
            return
        self._num_since = 0
        own = [calls[index] for index in piece.calls]
        device = piece.plan.device
        # The step is complete. A failed measurement must not make the step fail.
        try:
            naive = cut_into_pieces(own, LossSpec(), max_tokens, device, shares_prefixes=False)
            shared_s = yield from _seconds([piece.plan], passes, passes.attention)
            naive_s = yield from _seconds([one.plan for one in naive.pieces], passes, ROWS)
            self.metrics = {"forest_speedup": naive_s / shared_s}
        except Exception as error:
            log.warning("the speedup of sharing could not be measured: %r", error)


def _seconds(plans: Sequence[Plan], passes: Passes, attention: str) -> Generator[None, None, float]:
    total = 0.0
    for plan in plans:
        _synchronize(plan.device)
        started = time.perf_counter()
        edge_log_probs(passes.model, plan, attention, max_logits=MAX_LOGITS).sum().backward()
        _synchronize(plan.device)
        total += time.perf_counter() - started
        yield
    return total


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
