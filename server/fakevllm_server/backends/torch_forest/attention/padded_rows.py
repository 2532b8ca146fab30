"""Attention without shared prefixes: each call is a row of its own, padded on the right. A prefix
that several calls share is computed once for each call. This method works with every causal model.

The LM head is an exception: for a token that several calls share, the LM head runs only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fakevllm_server.backends.torch_forest.attention.transformers_hook import body_of
from fakevllm_server.backends.torch_forest.forward_plan import Plan, as_tensor

MAX_PADDING = 1.1
"""Largest ratio of the lengths of two rows in one forward pass."""


def rows(model: Any, plan: Plan) -> Tensor:
    """Run the model with one row for each call that has trained tokens. Return the hidden states
    from which the LM head predicts the trained tokens, [heads, hidden]. A head in this shape is a
    node (a token that calls may share) that predicts trained tokens, not an attention head."""
    body = body_of(model)
    flat: list[Tensor] = []
    flat_index = torch.zeros(len(plan.ids), dtype=torch.long, device=plan.device)
    num_before = 0
    for calls in _batches(plan):
        nodes = [as_tensor(plan.forest.row(call), plan.device) for call in calls]
        longest = max(map(len, nodes))
        ids = torch.zeros(len(nodes), longest, dtype=torch.long, device=plan.device)
        for index, row in enumerate(nodes):
            ids[index, : len(row)] = plan.ids[row]
            first = num_before + index * longest
            flat_index[row] = torch.arange(first, first + len(row), device=plan.device)
        # Under the causal mask no real token attends to the padding.
        states = body(input_ids=ids, use_cache=False).last_hidden_state
        flat.append(states.flatten(0, 1))
        num_before += len(nodes) * longest
    return torch.cat(flat).index_select(0, flat_index[plan.head_node])


def _batches(plan: Plan) -> Sequence[Sequence[int]]:
    """Divide the calls into batches of calls with similar lengths. Return the indices of the calls
    of each batch. Leave out calls without trained tokens."""
    trained = [call for call, number in enumerate(plan.num_trained) if number]
    lengths = {call: sum(end - start for start, end in plan.forest.paths[call]) for call in trained}
    batches: list[list[int]] = []
    for call in sorted(trained, key=lambda call: -lengths[call]):
        if batches and lengths[batches[-1][0]] <= MAX_PADDING * lengths[call]:
            batches[-1].append(call)
        else:
            batches.append([call])
    return batches
