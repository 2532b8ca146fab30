from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fakevllm_server.backends.verl.worker_placement import first_worker, lost_nodes, place_workers
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


def row(node: str, address: str, gpus: int | None, *, is_alive: bool = True) -> dict[str, Any]:
    """Return a row of `ray.nodes()`. A dead node has no resources there."""
    resources = {} if gpus is None else {"GPU": float(gpus)}
    return {
        "NodeID": node,
        "NodeManagerAddress": address,
        "Alive": is_alive,
        "Resources": resources,
    }


def test_dead_nodes_and_nodes_that_do_not_answer_are_lost_unless_they_were_started_again() -> None:
    nodes = [
        row("answers", "10.0.0.1", 8),
        row("frozen", "10.0.0.2", 8),
        row("dead", "10.0.0.3", None, is_alive=False),
        row("dead before its new start", "10.0.0.1", None, is_alive=False),
        row("without GPUs", "10.0.0.4", None),
    ]
    assert lost_nodes(nodes, ["answers"]) == ["10.0.0.2", "10.0.0.3"]
    assert lost_nodes(nodes[:1], ["answers"]) == []
