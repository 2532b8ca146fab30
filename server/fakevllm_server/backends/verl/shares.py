"""Which worker trains on which calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fakevllm_server.types.backend import BackendError, Call

PADDING = Call("", [0], [0], [0.0], version=0, temperature=1.0, advantage=0.0, weight=0.0)
"""A row that only makes the number of rows divisible: nothing is learned from it."""


def deal(calls: Sequence[Call], num_workers: int) -> list[Call]:
    """All calls with a response, in shares of equal number and like length, one after another.
    Raises BackendError for a call that has no log-probability to train on.

    >>> [len(call.prompt_ids) for call in deal([PADDING] * 3, 2)]
    [1, 1, 1, 1]
    """
    for call in calls:
        if not call.prompt_ids:
            raise BackendError("a call without prompt has no first token to predict from")
        if not call.temperature > 0:
            raise BackendError("greedy calls have no log-probability to train on")
    rows = sorted((call for call in calls if call.response_ids), key=num_tokens, reverse=True)
    rows += [PADDING] * (-len(rows) % num_workers)
    return [call for share in range(num_workers) for call in rows[share::num_workers]]


def num_tokens(call: Call) -> int:
    return len(call.prompt_ids) + len(call.response_ids)


def total_weight(calls: Sequence[Call]) -> float:
    """Of all response tokens: what the loss of the whole batch is divided by."""
    return sum(call.weight * len(call.response_ids) for call in calls)


def token_weights(rows: Sequence[Call]) -> Tensor:
    """Of all response tokens, row after row: their calls'."""
    return torch.cat([torch.full((len(row.response_ids),), row.weight) for row in rows])
