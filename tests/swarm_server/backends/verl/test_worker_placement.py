from __future__ import annotations

from collections.abc import Sequence

import pytest

from fakevllm_server.backends.verl.worker_placement import first_worker, place_workers
from fakevllm_server.types.backend import BackendRefused


@pytest.mark.parametrize(
    ("nodes", "num_workers", "expected"),
    [
        ([1], None, [1]),
        ([8, 8], None, [8, 8]),
        ([0, 8], None, [8]),
        ([8, 8], 4, [4]),
        ([8, 8, 2], 12, [6, 6]),
    ],
)
def test_workers_use_as_few_nodes_as_possible_with_the_same_number_on_each(
    nodes: Sequence[int], num_workers: int | None, expected: list[int]
) -> None:
    assert place_workers(nodes, num_workers) == expected


def test_nodes_that_cannot_have_the_same_number_of_workers_are_refused() -> None:
    with pytest.raises(BackendRefused, match="nodes are 4, 2; lower "):
        place_workers([2, 4], None)


@pytest.mark.parametrize(
    ("nodes", "min_workers", "expected"),
    [([1], 1, [1]), ([1, 1, 1], 2, [1, 1, 1]), ([8, 4], 1, [8]), ([4, 4], 8, [4, 4])],
)
def test_fewer_gpus_than_workers_get_as_many_workers_as_fit_if_the_minimum_allows(
    nodes: Sequence[int], min_workers: int, expected: list[int]
) -> None:
    assert place_workers(nodes, 16, min_workers) == expected
    with pytest.raises(BackendRefused, match="16 workers do not fit"):
        place_workers(nodes, 16, sum(nodes) + 1)


def test_more_workers_than_gpus_are_refused() -> None:
    with pytest.raises(BackendRefused, match="3 workers do not fit"):
        place_workers([2], 3)


def test_a_cluster_without_gpus_is_refused() -> None:
    with pytest.raises(BackendRefused, match="nodes are none"):
        place_workers([0, 0], None)


@pytest.mark.parametrize(
    ("gpus", "listed", "first"),
    [
        (["0"], None, 0),
        (["2", "0", "1"], None, 1),
        (["10", "9"], None, 1),
        (["4", "7"], "7, 4", 1),
        (["GPU-b", "GPU-a"], "GPU-a,GPU-b", 1),
        (["3", "1"], "0,1", 1),
    ],
)
def test_the_worker_on_the_first_gpu_is_found_whatever_order_workers_got_gpus_in(
    gpus: Sequence[str], listed: str | None, first: int
) -> None:
    assert first_worker(gpus, listed) == first
