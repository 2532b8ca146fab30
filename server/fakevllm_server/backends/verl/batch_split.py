"""Divide a batch of calls among the workers."""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm_server.types.backend import BackendError, Call

PADDING = Call("", [0], [0], [0.0], version=0, temperature=1.0, advantage=0.0, weight=0.0)
"""A row with weight 0. Such rows are added until all workers have the same number of rows."""


def trainable_calls(calls: Sequence[Call]) -> list[Call]:
    """Return the calls that have a response. Raises BackendError for a call without a prompt or
    with temperature 0, because such calls cannot be trained."""
    for call in calls:
        if not call.prompt_ids:
            raise BackendError(
                "a call without a prompt cannot be trained on: nothing predicts its first token"
            )
        if not call.temperature > 0:
            raise BackendError("greedy calls have no log-probability to train on")
    return [call for call in calls if call.response_ids]


def split_among_workers(calls: Sequence[Call], num_workers: int) -> list[Call]:
    """Divide the calls of a batch among the workers. Return one list that has the rows (calls) of
    worker 0 first, then the rows of worker 1, and so on.

    Each worker gets the same number of rows, and nearly the same number of tokens. If necessary,
    padding rows with weight 0 are added.

    >>> [len(call.prompt_ids) for call in split_among_workers([PADDING] * 3, 2)]
    [1, 1, 1, 1]
    """
    rows = sorted(calls, key=num_tokens, reverse=True)
    rows += [PADDING] * (-len(rows) % num_workers)
    return [call for worker in range(num_workers) for call in rows[worker::num_workers]]


def num_tokens(call: Call) -> int:
    """Return the number of tokens in a call's prompt and response together."""
    return len(call.prompt_ids) + len(call.response_ids)
