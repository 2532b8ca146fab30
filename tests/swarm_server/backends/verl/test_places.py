from __future__ import annotations

from collections.abc import Sequence

import pytest

from fakevllm_server.backends.verl.places import spread
from fakevllm_server.types.backend import BackendRefused


@pytest.mark.parametrize(
    ("nodes", "wanted", "places"),
    [
        ([1], None, [1]),
        ([8, 8], None, [8, 8]),
        ([0, 8], None, [8]),
        ([8, 8], 4, [4]),
        ([8, 8, 2], 12, [6, 6]),
    ],
)
def test_workers_take_few_nodes_and_as_many_gpus_on_each(
    nodes: Sequence[int], wanted: int | None, places: list[int]
) -> None:
    assert spread(nodes, wanted) == places


def test_nodes_that_cannot_hold_as_many_each_are_refused() -> None:
    with pytest.raises(BackendRefused, match="nodes have 4, 2; give --num-workers"):
        spread([2, 4], None)


def test_more_workers_than_gpus_are_refused() -> None:
    with pytest.raises(BackendRefused, match="3 workers do not fit"):
        spread([2], 3)


def test_a_cluster_without_gpus_is_refused() -> None:
    with pytest.raises(BackendRefused, match="nodes have none"):
        spread([0, 0], None)
