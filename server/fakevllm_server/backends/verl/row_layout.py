"""Positions of response tokens in the rows of verl's workers. A row has the tokens of one call.

The workers' outputs are jagged tensors [rows, tokens]. In a row, the value for token i + 1 is at
position i, where the model predicts this token. The trainer's own tensors are flat: they have the
response tokens of all rows, one row after another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fakevllm_server.backends.verl.batch_split import num_tokens
from fakevllm_server.types.backend import Call


def select_responses(rows: Sequence[Call], per_token: Tensor) -> list[Tensor]:
    """Return the part of a worker's output that belongs to response tokens, as one tensor [response
    tokens] for each row. `per_token` is a jagged tensor [rows, tokens]."""
    return [
        values[len(row.prompt_ids) - 1 : num_tokens(row) - 1].float()
        for row, values in zip(rows, per_token.unbind(), strict=True)
    ]


def spread_responses(rows: Sequence[Call], per_response_token: Tensor) -> Tensor:
    """Return a jagged tensor [rows, tokens] in the layout of a worker's output. The values are
    those of the flat tensor `per_response_token`, and 0 at all other positions."""
    lengths = [len(row.response_ids) for row in rows]
    parts = per_response_token.split(lengths)
    padded = [
        torch.nn.functional.pad(part, (len(row.prompt_ids) - 1, 1))
        for row, part in zip(rows, parts, strict=True)
    ]
    return torch.nested.as_nested_tensor(padded, layout=torch.jagged)
