"""Choose the attention method of the trainer. The choice is the fastest method that gives the same
results as the unchanged model.

Each method is checked once, before its first use in training. The checks are repeated if a new job
changes how the model computes, for example with adapters or gradient checkpointing.
"""

from __future__ import annotations

from typing import Any

from fakevllm_server.backends.torch_forest.attention.registry import (
    ROWS,
    first_without_fault,
    sharing_attentions,
)
from fakevllm_server.backends.torch_forest.attention_check import (
    AttentionCheck,
    check_attention,
    check_sharing_attention,
)
from fakevllm_server.types.backend import BackendRefused


class AttentionChoice:
    """The choice of the attention method for one model, with the results of the checks."""

    def __init__(self) -> None:
        self._checks: dict[str, AttentionCheck] = {}
        self._sharing: str | None = None
        """The preferred method among those that share prefixes and pass the check, or ROWS if no
        such method passes. None before the first choice."""

    def reset(self) -> None:
        """Discard the results of the checks of all attention methods, so that each method is
        checked again. Call this method after a change that may alter the model's results."""
        self._checks.clear()
        self._sharing = None

    def best(self, model: Any, shares_prefixes: bool) -> str:
        """Return the name of the attention method to use. The result is a method that shares
        prefixes if `shares_prefixes` is true and such a method passes the check. Otherwise the
        result is `rows`, which computes each call separately. Raises BackendRefused if even `rows`
        fails the check."""
        # The method `rows` is always checked, because pieces that share too few tokens use it.
        fault = self._fault(model, ROWS)
        if fault is not None:
            raise BackendRefused(
                f"this model cannot be trained here: {fault}; choose another --model"
            )
        if not shares_prefixes:
            return ROWS
        if self._sharing is None:
            self._sharing = first_without_fault(
                sharing_attentions(model.device), lambda attention: self._fault(model, attention)
            )
        return self._sharing

    def _fault(self, model: Any, attention: str) -> str | None:
        if attention not in self._checks:
            check = check_attention if attention == ROWS else check_sharing_attention
            self._checks[attention] = check(model, attention)
        return self._checks[attention].fault
