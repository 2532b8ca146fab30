"""Choose the fastest attention that gives the same results as the model itself.

Asked before anything is trained or served, and once: a boot that changes what is trained has it
asked again.
"""

from __future__ import annotations

import logging
from typing import Any

from fakevllm_server.backends.torch_forest.attentions import ROWS, sharing_attentions
from fakevllm_server.backends.torch_forest.self_check import (
    AttentionCheck,
    check_attention,
    check_sharing_attention,
)
from fakevllm_server.types.backend import BackendRefused

log = logging.getLogger("fakevllm.trainer")


class AttentionChoice:
    """Of one model."""

    def __init__(self) -> None:
        self._verdicts: dict[str, AttentionCheck] = {}
        self._merging: str | None = None
        """The best that merges, ROWS where none may; None while nobody has asked."""

    def forget(self) -> None:
        """The model computes in another way now."""
        self._verdicts.clear()
        self._merging = None

    def best(self, model: Any, shares_prefixes: bool) -> str:
        """Raises BackendRefused for a model whose log-probabilities come out wrong even where
        nothing is shared."""
        # First, and whatever is wanted: pieces that share too little take it too.
        fault = self._fault(model, ROWS)
        if fault is not None:
            raise BackendRefused(
                f"this model cannot be trained here: {fault}; choose another --model"
            )
        if not shares_prefixes:
            return ROWS
        if self._merging is None:
            self._merging = self._best_merging(model)
        return self._merging

    def _best_merging(self, model: Any) -> str:
        faults: dict[str, None] = {}
        for way in sharing_attentions(model.device):
            fault = self._fault(model, way)
            if fault is None:
                if faults:
                    log.warning("calls share prefixes by attention %s: %s", way, "; ".join(faults))
                return way
            faults[fault] = None  # what refuses all ways is said once
        log.warning("calls share no prefixes in training: %s", "; ".join(faults))
        return ROWS

    def _fault(self, model: Any, way: str) -> str | None:
        if way not in self._verdicts:
            self._verdicts[way] = (check_attention if way == ROWS else check_sharing_attention)(
                model, way
            )
        return self._verdicts[way].fault
