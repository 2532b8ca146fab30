"""Attention for one new token per row. The token attends to a prefix that several rows share, and
to the row's own tokens.

The requests of a group have the same prompt. If the prompt is long, ordinary decoding spends most
of its time on reading the keys and values of the prompt, once for each row. Here, the keys and
values are read only once for all rows that share the prefix. One matrix product multiplies the
queries of these rows with the keys of the prefix. The result for the prefix and the result for the
row's own tokens are then combined, weighted by the sums of their exponentiated scores. The combined
result equals the result of ordinary attention, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fakevllm_server.backends.embedded.decode.kv_cache import SharedRows


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    shared_rows: Sequence[SharedRows],
    layer: int,
    scaling: float,
) -> Tensor:
    """Return the attended values for one new token per row, [rows, heads, head dim].

    The token attends to the row's own tokens, and to the prefix that the row shares with other
    rows, if any. `shared_rows` has the shared prefixes, each with its rows.

    `queries` is [rows, heads, head dim]. `keys` and `values` are those of each row's own tokens,
    [rows, key heads, width, head dim]. `mask` is the additive mask of the row's own tokens, [rows,
    1, 1, width].
    """
    num_rows, num_kv_heads = keys.shape[:2]
    grouped = (queries * scaling).view(num_rows, num_kv_heads, -1, queries.shape[-1])
    attended, sums = _weighted((grouped @ keys.transpose(2, 3)).add_(mask), values)
    for one in shared_rows:
        shared_keys, shared_values = (part[layer] for part in one.shared.prefix)
        asking = grouped[one.rows].transpose(0, 1).reshape(num_kv_heads, -1, grouped.shape[-1])
        found, found_sums = (
            part.view(num_kv_heads, one.num_rows, -1, part.shape[-1]).transpose(0, 1)
            for part in _weighted(asking @ shared_keys.transpose(1, 2), shared_values)
        )
        share = torch.sigmoid(found_sums - sums[one.rows])
        attended[one.rows] = torch.lerp(attended[one.rows], found, share)
    return attended.view(num_rows, queries.shape[1], -1)


def _weighted(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return a pair: the mean of the values with the softmax of the scores as weights, and the
    log-sum-exp of the scores."""
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp_()
    total = weights.sum(-1, keepdim=True)
    return (weights @ values).div_(total), total.log_().add_(largest)
