"""Split a batch of calls among the workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fakevllm_server.types.backend import BackendError, Call

PADDING = Call("", [0], [0], [0.0], version=0, temperature=1.0, advantage=0.0, weight=0.0)
"""A row with weight 0. Such rows make the number of rows divisible by the number of workers."""


def split_batch(calls: Sequence[Call], num_workers: int) -> list[Call]:
    """Return the calls of a batch in the order of the workers. All calls of worker 0 come first,
    then all calls of worker 1, and so on. Each returned call is one row. Calls without a response
    are left out.

    Each worker gets the same number of rows and about the same number of tokens. If the number of
    rows is not divisible by the number of workers, padding rows are added. Raises BackendError for
    a call without a prompt, and for a call with temperature 0, because the log-probabilities of
    such calls cannot be trained.

    >>> [len(call.prompt_ids) for call in split_batch([PADDING] * 3, 2)]
    [1, 1, 1, 1]
    """
    for call in calls:
        if not call.prompt_ids:
            raise BackendError(
                "a call without a prompt cannot be trained on: nothing predicts its first token"
            )
        if not call.temperature > 0:
            raise BackendError("greedy calls have no log-probability to train on")
    rows = sorted((call for call in calls if call.response_ids), key=num_tokens, reverse=True)
    rows += [PADDING] * (-len(rows) % num_workers)
    return [call for worker in range(num_workers) for call in rows[worker::num_workers]]


def num_tokens(call: Call) -> int:
    """Return the number of tokens in the prompt and the response of a call."""
    return len(call.prompt_ids) + len(call.response_ids)


def total_weight(calls: Sequence[Call]) -> float:
    """Return the sum of the loss weights of all response tokens, which is the denominator of the
    batch's loss."""
    return sum(call.weight * len(call.response_ids) for call in calls)


def token_weights(rows: Sequence[Call]) -> Tensor:
    """Return the loss weights of all response tokens, row after row, [tokens]. Each token has the
    weight of its call."""
    return torch.cat([torch.full((len(row.response_ids),), row.weight) for row in rows])
