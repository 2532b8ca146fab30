"""The ways through a model, by name. A new one is a file and an entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.chains import chains, is_available
from fakevllm_server.backends.torch_forest.dense import dense
from fakevllm_server.backends.torch_forest.flex import flex
from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.backends.torch_forest.rows import rows
from fakevllm_server.backends.torch_forest.segments import segments

ROWS = "rows"
"""Calls one by one: nothing is shared."""

HeadStates = Callable[[Any, Plan], Tensor]
"""(model, plan) -> [heads, hidden], the states the LM head runs on."""

ATTENTIONS: dict[str, HeadStates] = {
    "chains": chains,
    "segments": segments,
    "dense": dense,
    "flex": flex,
    ROWS: rows,
}


def default_attention(device: torch.device) -> str:
    """Return the fastest attention that shares prefixes on `device`."""
    if is_available(device):
        return "chains"
    return "flex" if device.type == "cuda" else "segments"


def sharing_attentions(device: torch.device) -> list[str]:
    """The fastest first; then the one that needs nothing of a device or of torch."""
    return list(dict.fromkeys([default_attention(device), "segments"]))


MIN_RHO = 1.08
"""Below it a CPU computes plain rows as quickly, or quicker where calls are short: measured."""


def quickest_attention(plan: Plan, merging: str) -> str:
    """The way for this piece, where `merging` is what the device and the self-check allow. Rows
    take `rho` times the piece's memory, so at most that little more than its budget."""
    return merging if plan.forest.rho >= MIN_RHO else ROWS
