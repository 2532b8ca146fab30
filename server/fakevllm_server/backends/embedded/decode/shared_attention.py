"""Attention of one new token per row to a prefix that several rows share, and to each row's own
tokens.

The siblings of a group have the same prompt. Reading its keys and values once per row takes most of
the time of a decode iteration with long prompts, because the memory is slower than the arithmetic.
Here, the queries of all rows that share a prefix are multiplied with its keys in one matrix product.
The scores of the prefix and those of the row's own tokens then go through one softmax, so the result
is that of ordinary attention up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Return the attended values, [rows, heads, head dim].

    `queries` is [rows, heads, head dim]. `keys` and `values` are those of each row's own tokens,
    [rows, key heads, width, head dim], and `mask` is their additive mask, [rows, 1, 1, width].
    """
    rows, num_kv_heads, width, _ = keys.shape
    grouped = (queries * scaling).view(rows, num_kv_heads, -1, queries.shape[-1])
    num_grouped = grouped.shape[2]
    longest = max(one.shared.prefix.num_tokens for one in shared_rows)
    # Rows with a shorter prefix, or none, give no weight to the rest.
    scores = queries.new_full((rows, num_kv_heads, num_grouped, longest + width), -float("inf"))
    scores[..., longest:] = (grouped @ keys.transpose(2, 3)).add_(mask)
    for one in shared_rows:
        shared_keys = one.shared.prefix.keys[layer]
        length = shared_keys.shape[1]
        asking = grouped[one.rows].transpose(0, 1).reshape(num_kv_heads, -1, grouped.shape[-1])
        found = (asking @ shared_keys.transpose(1, 2)).view(
            num_kv_heads, one.num_rows, num_grouped, length
        )
        scores[one.rows, :, :, :length] = found.transpose(0, 1)
    weights = scores.softmax(-1)
    attended = weights[..., longest:] @ values
    for one in shared_rows:
        shared_values = one.shared.prefix.values[layer]
        own = weights[one.rows, :, :, : shared_values.shape[1]].transpose(0, 1)
        added = own.reshape(num_kv_heads, -1, shared_values.shape[1]) @ shared_values
        attended[one.rows] += added.view(
            num_kv_heads, one.num_rows, num_grouped, shared_values.shape[-1]
        ).transpose(0, 1)
    return attended.view(rows, queries.shape[1], -1)
