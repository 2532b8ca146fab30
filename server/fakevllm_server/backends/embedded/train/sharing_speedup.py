"""How much quicker a step's shared pass is than the same calls one by one: measured, not reckoned.

Both ways go forward and backward through the model with the calls of one piece, one right after the
other, the naive one in as many passes as its tokens need to keep to the budget. That costs as much
as the piece would without sharing, so it is done at the first step that shares anything, and seldom
after it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence

import torch

from fakevllm_server.backends.embedded.train.passes import MAX_LOGITS, Passes
from fakevllm_server.backends.embedded.train.step_pieces import StepPieces, cut_into_pieces
from fakevllm_server.backends.torch_forest.attentions import ROWS
from fakevllm_server.backends.torch_forest.forward import edge_log_probs
from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.types.backend import Call, LossSpec, StepMetrics

log = logging.getLogger("fakevllm.trainer")

EVERY = 100
"""Steps from one measurement to the next."""


class SharingSpeedup:
    """Remembers the last measurement."""

    def __init__(self) -> None:
        self.metrics: StepMetrics = {}
        """`forest_speedup`: seconds one by one / seconds shared, of one piece, once any step has
        shared anything."""
        self._num_since = EVERY

    def after(
        self, step: StepPieces, calls: Sequence[Call], through: Passes, max_tokens: int
    ) -> Generator[None, None, None]:
        """Behind a step's last update, once its gradients are gone: it leaves some that must go
        too."""
        self._num_since += 1
        piece = next((one for one in step.pieces if through.way(one) != ROWS), None)
        if piece is None or self._num_since < EVERY:
            return
        self._num_since = 0
        own = [calls[index] for index in piece.calls]
        device = piece.plan.device
        # Isolated: the step is made, and a measurement must not cost it.
        try:
            naive = cut_into_pieces(own, LossSpec(), max_tokens, device, shares_prefixes=False)
            shared_s = yield from _seconds([piece.plan], through, through.attention)
            naive_s = yield from _seconds([one.plan for one in naive.pieces], through, ROWS)
            self.metrics = {"forest_speedup": naive_s / shared_s}
        except Exception as error:
            log.warning("what sharing saves could not be measured: %r", error)


def _seconds(
    plans: Sequence[Plan], through: Passes, attention: str
) -> Generator[None, None, float]:
    total = 0.0
    for plan in plans:
        _settle(plan.device)
        started = time.perf_counter()
        edge_log_probs(through.model, plan, attention, max_logits=MAX_LOGITS).sum().backward()
        _settle(plan.device)
        total += time.perf_counter() - started
        yield
    return total


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
