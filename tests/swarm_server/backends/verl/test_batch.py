"""What becomes of a batch's calls on their way to the workers, and of what they tell."""

from __future__ import annotations

import math

import pytest
import torch

from fakevllm_server.backends.verl.seen import seen
from fakevllm_server.backends.verl.shares import PADDING, deal, num_tokens
from fakevllm_server.types.backend import BackendError, Call


def call(num_prompt: int, num_response: int, weight: float = 1.0) -> Call:
    logprobs = [-1.0] * num_response
    return Call("g", [7] * num_prompt, [8] * num_response, logprobs, 0, 1.0, 1.0, weight)


def test_every_call_is_dealt_once_and_every_worker_gets_as_many_rows() -> None:
    calls = [call(2, length) for length in (9, 1, 5, 3, 7)]

    rows = deal(calls, 2)

    assert len(rows) == 6 and rows.count(PADDING) == 1
    assert sorted(map(num_tokens, rows)) == sorted([*map(num_tokens, calls), 2])
    first, second = rows[:3], rows[3:]
    assert [num_tokens(row) for row in first] == [11, 7, 3]
    assert [num_tokens(row) for row in second] == [9, 5, 2]


def test_a_call_without_response_is_no_row() -> None:
    assert deal([call(2, 0)], 3) == []


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (call(0, 2), "without prompt"),
        (Call("g", [1], [2], [0.0], 0, 0.0, 1.0, 1.0), "greedy calls"),
    ],
)
def test_a_call_that_cannot_be_trained_on_is_named(wrong: Call, reason: str) -> None:
    with pytest.raises(BackendError, match=reason):
        deal([call(2, 2), wrong], 1)


def test_means_weigh_calls_and_padding_counts_for_nothing() -> None:
    rows = [call(1, 2), call(1, 1, weight=0.5), PADDING]
    log_probs = [torch.tensor([-1.0, -2.0]), torch.tensor([-4.0]), torch.tensor([-50.0])]
    entropies = [torch.tensor([1.0, 1.0]), torch.tensor([3.0]), torch.tensor([9.0])]

    metrics = seen(rows, log_probs, entropies)

    assert metrics["mismatch"] == pytest.approx((0 + 1 + 0.5 * 3) / 2.5)
    assert metrics["entropy"] == pytest.approx((1 + 1 + 0.5 * 3) / 2.5)
    assert metrics["prob_diff_max"] == pytest.approx(math.exp(-1) - math.exp(-4))
