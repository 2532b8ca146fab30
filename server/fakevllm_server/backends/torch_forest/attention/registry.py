"""The table of attention methods, and the choice of the fastest method for a piece (a set of calls
that go through the model together).

To add a method, add a file and an entry in ATTENTIONS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.attention.chain_attention import chains, is_available
from fakevllm_server.backends.torch_forest.attention.dense import dense
from fakevllm_server.backends.torch_forest.attention.flex import flex
from fakevllm_server.backends.torch_forest.attention.padded_rows import rows
from fakevllm_server.backends.torch_forest.attention.segment_attention import segments
from fakevllm_server.backends.torch_forest.forward_plan import Plan

ROWS = "rows"
"""Name of the method that computes calls one by one and shares nothing."""

HeadStates = Callable[[Any, Plan], Tensor]
"""Function of (model, plan) that returns the hidden states on which the LM head runs, [heads,
hidden]."""

ATTENTIONS: dict[str, HeadStates] = {
    "chains": chains,
    "segments": segments,
    "dense": dense,
    "flex": flex,
    ROWS: rows,
}


def default_attention(device: torch.device) -> str:
    """Return the name of the attention method that is fastest on `device`, among the methods that
    share prefixes."""
    if is_available(device):
        return "chains"
    return "flex" if device.type == "cuda" else "segments"


def sharing_attentions(device: torch.device) -> list[str]:
    """Return the names of the attention methods that share prefixes. The first one is the fastest
    method on `device`. The next one needs no special kernel."""
    return list(dict.fromkeys([default_attention(device), "segments"]))


MIN_RHO = 1.08
"""Sharing factor (tokens per node, `Forest.rho`) below which `rows` is used. Below this measured
value a CPU computes plain rows as fast as a forest, or faster if calls are short."""


def fastest_attention(plan: Plan, sharing_attention: str) -> str:
    """Return the name of the fastest attention method for a piece (a set of calls that go through
    the model together). `sharing_attention` is the best method that shares prefixes on this device.

    `rho` is the piece's sharing factor: the number of tokens of all calls divided by the number of
    computed tokens. If `rho` is at least MIN_RHO, the result is `sharing_attention`. Otherwise the
    result is `rows`, which shares no prefixes. The size of a piece is chosen for computation with
    shared prefixes. Therefore a piece with `rows` may exceed the token budget, by less than the
    factor MIN_RHO.
    """
    return sharing_attention if plan.forest.rho >= MIN_RHO else ROWS
