"""The table of attention methods, and the choice of the fastest method for a piece (a set of calls
that go through the model together).

To add a method, add a file and an entry in ATTENTIONS.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.attention.chain_attention import chains, is_available
from fakevllm_server.backends.torch_forest.attention.dense import dense
from fakevllm_server.backends.torch_forest.attention.flex import flex
from fakevllm_server.backends.torch_forest.attention.padded_rows import rows
from fakevllm_server.backends.torch_forest.attention.segment_attention import segments
from fakevllm_server.backends.torch_forest.forward_plan import Plan

log = logging.getLogger("fakevllm.trainer")

ROWS = "rows"
"""Name of the method that computes each call as a row of its own and shares no prefixes."""

HeadStates = Callable[[Any, Plan], Tensor]
"""Function that takes (model, plan) and returns the hidden states on which the LM head runs,
[heads, hidden]. A head in this shape is a node that predicts trained tokens."""

ATTENTIONS: dict[str, HeadStates] = {
    "chains": chains,
    "segments": segments,
    "dense": dense,
    "flex": flex,
    ROWS: rows,
}


def default_attention(device: torch.device) -> str:
    """Return the name of the fastest prefix-sharing attention method on `device`. Such a method
    computes a common prefix of several calls only once."""
    if is_available(device):
        return "chains"
    return "flex" if device.type == "cuda" else "segments"


def sharing_attentions(device: torch.device) -> list[str]:
    """Return the names of the prefix-sharing attention methods, in the order in which to try them.
    Such a method computes a common prefix of several calls only once. The first method is the
    fastest on `device`. The last method is `segments`, which needs no special kernel."""
    return list(dict.fromkeys([default_attention(device), "segments"]))


def first_without_fault(attentions: Sequence[str], fault_of: Callable[[str], str | None]) -> str:
    """Return the first of `attentions` without a fault, or `rows` if all of them have a fault. Log
    a warning with the faults that were found. `fault_of` checks an attention method on a model, and
    returns why the method must not be used, or None."""
    # Ordered, without duplicates, because all methods may fail alike.
    faults: dict[str, None] = {}
    for attention in attentions:
        fault = fault_of(attention)
        if fault is None:
            if faults:
                log.warning(
                    "calls share prefixes by attention %s: %s", attention, "; ".join(faults)
                )
            return attention
        faults[fault] = None
    log.warning("calls share no prefixes in training: %s", "; ".join(faults))
    return ROWS


MIN_RHO = 1.08
"""If the sharing factor `Forest.rho` (tokens of all calls per node) is smaller than this value, the
method `rows` is used. The value was measured on a CPU. With less sharing, plain rows are as fast as
a forest, and faster if calls are short."""


def fastest_attention(plan: Plan, sharing_attention: str) -> str:
    """Return the name of the fastest attention method for a piece (a set of calls that go through
    the model together). `sharing_attention` is the name of the fastest method that shares prefixes
    on the plan's device.

    `rho` is the piece's sharing factor: the number of tokens of all calls divided by the number of
    computed tokens. If `rho` is at least MIN_RHO, the result is `sharing_attention`. Otherwise the
    result is `rows`, which shares no prefixes. The token budget limits the size of a piece as if
    prefixes were shared. Therefore a piece that is computed with `rows` may exceed the budget, but
    by less than the factor MIN_RHO.
    """
    return sharing_attention if plan.forest.rho >= MIN_RHO else ROWS
