from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from fakevllm_server.backends.weight_transfer.weight_source import in_chunks

SIZES = (4, 4, 8, 2, 30, 1, 1, 10)
"""Sizes of weights in bytes."""


def weights(sizes: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    for index, size in enumerate(sizes):
        yield f"w{index}", torch.zeros(size, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("max_bytes", "expected"),
    [
        (1, [[4], [4], [8], [2], [30], [1], [1], [10]]),
        (8, [[4, 4], [8], [2], [30], [1, 1], [10]]),
        (10, [[4, 4], [8, 2], [30], [1, 1], [10]]),
        (12, [[4, 4], [8, 2], [30], [1, 1, 10]]),
        (100, [list(SIZES)]),
    ],
)
def test_chunks_have_all_weights_in_their_order_and_only_a_large_weight_exceeds_the_limit(
    max_bytes: int, expected: list[list[int]]
) -> None:
    chunks = list(in_chunks(weights(SIZES), max_bytes))
    assert [[weight.nbytes for weight in chunk.values()] for chunk in chunks] == expected
    assert [name for chunk in chunks for name in chunk] == [name for name, _ in weights(SIZES)]


def test_no_weights_are_no_chunks() -> None:
    assert list(in_chunks(iter(()), 8)) == []


def test_a_weight_is_read_only_when_the_chunk_before_it_was_taken() -> None:
    num_read = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal num_read
        for item in weights(SIZES):
            num_read += 1
            yield item

    chunks = in_chunks(counted(), 10)
    num_yielded = 0
    for chunk in chunks:
        num_yielded += len(chunk)
        assert num_read <= num_yielded + 1
    assert num_read == len(SIZES)
