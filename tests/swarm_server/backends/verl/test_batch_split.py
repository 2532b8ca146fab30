"""The split of a batch among the workers, and the metrics of their output."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from fakevllm_server.backends.torch_forest.attention.registry import ROWS
from fakevllm_server.backends.verl.batch_split import (
    PADDING,
    num_tokens,
    split_among_workers,
    trainable_calls,
)
from fakevllm_server.backends.verl.forest_split import WorkerRows
from fakevllm_server.backends.verl.step_rows import RowValues, StepRows
from fakevllm_server.types.backend import BackendError, Call, LossSpec


def call(num_prompt: int, num_response: int, weight: float = 1.0) -> Call:
    logprobs = [-1.0] * num_response
    return Call("g", [7] * num_prompt, [8] * num_response, logprobs, 0, 1.0, 1.0, weight)


def test_every_call_is_one_row_and_all_workers_get_the_same_number_of_rows() -> None:
    calls = [call(2, length) for length in (9, 1, 5, 3, 7)]

    rows = split_among_workers(calls, 2)

    assert len(rows) == 6 and rows.count(PADDING) == 1
    assert sorted(map(num_tokens, rows)) == sorted([*map(num_tokens, calls), 2])
    first, second = rows[:3], rows[3:]
    assert [num_tokens(row) for row in first] == [11, 7, 3]
    assert [num_tokens(row) for row in second] == [9, 5, 2]


def test_a_call_without_a_response_gives_no_row() -> None:
    assert trainable_calls([call(2, 0)]) == []


@pytest.mark.parametrize(
    ("invalid", "reason"),
    [
        (call(0, 2), "without a prompt"),
        (Call("g", [1], [2], [0.0], 0, 0.0, 1.0, 1.0), "greedy calls"),
    ],
)
def test_a_call_that_cannot_be_trained_on_is_an_error(invalid: Call, reason: str) -> None:
    with pytest.raises(BackendError, match=reason):
        trainable_calls([call(2, 2), invalid])


def test_means_are_weighted_by_calls_and_ignore_padding() -> None:
    divide = partial(WorkerRows.of, num_workers=3, max_tokens=100, attention=ROWS)
    calls = [call(1, 2), call(1, 1, weight=0.5)]
    step = StepRows.of(calls, [], LossSpec(), divide, version=0)
    assert [len(row.response_ids) for row in step.rows] == [2, 1, 1]
    log_probs, entropies = torch.tensor([-1.0, -2, -4, -50]), torch.tensor([1.0, 1, 3, 9])

    metrics = step.metrics(RowValues(log_probs, entropies), is_first=True)

    assert metrics["mismatch"] == pytest.approx((0 + 1 + 0.5 * 3) / 2.5)
    assert metrics["entropy"] == pytest.approx((1 + 1 + 0.5 * 3) / 2.5)
    assert metrics["prob_diff_max"] == pytest.approx(math.exp(-1) - math.exp(-4))
