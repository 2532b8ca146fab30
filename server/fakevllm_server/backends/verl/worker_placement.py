"""Placement of the verl trainer's workers: the number of workers on each node of the Ray cluster,
and the worker on the first GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fakevllm_server.types.backend import BackendRefused


def place_workers(
    num_gpus_per_node: Sequence[int], num_workers: int | None, min_workers: int | None = None
) -> list[int]:
    """Return the number of workers on each node that gets workers. All these nodes get the same
    number of workers, and as few nodes as possible are used. `num_gpus_per_node` has the number of
    GPUs of each node. A worker takes one GPU.

    If `num_workers` is None, there is one worker for each GPU. If the workers do not fit, place as
    many as possible, but at least `min_workers`. If `min_workers` is None, place all of them.
    Raises BackendRefused if no placement is possible.

    >>> place_workers([8, 8], None), place_workers([8, 8], 4), place_workers([8, 8, 2], 12)
    ([8, 8], [4], [6, 6])
    >>> place_workers([8, 2], 16, min_workers=1)
    [8]
    """
    nodes = sorted((count for count in num_gpus_per_node if count), reverse=True)
    wanted = sum(nodes) if num_workers is None else num_workers
    smallest = wanted if min_workers is None else min(min_workers, wanted)
    for number in range(wanted, smallest - 1, -1):
        for num_nodes in range(1, len(nodes) + 1):
            workers_per_node, rest = divmod(number, num_nodes)
            if rest == 0 and 0 < workers_per_node <= nodes[num_nodes - 1]:
                return [workers_per_node] * num_nodes
    raise BackendRefused(
        f"{wanted} workers do not fit: each needs one GPU, every node needs the same number of "
        f"workers, and the numbers of GPUs of the nodes are "
        f"{', '.join(map(str, nodes)) or 'none'}; lower cluster.training_gpus or --num-workers"
    )


def has_gpus(node: Mapping[str, Any]) -> bool:
    """Return True if a node is alive for Ray and has GPUs. `node` is a row of `ray.nodes()`."""
    return node["Alive"] and node["Resources"].get("GPU", 0) >= 1


def lost_nodes(nodes: Sequence[Mapping[str, Any]], answering: Collection[str]) -> list[str]:
    """Return the addresses of the nodes that are dead, or that have GPUs and do not answer. `nodes`
    are the rows of `ray.nodes()`, and `answering` has the IDs of the nodes that answer.

    A node that was started again has a new ID and its old address. It is not lost. Ray also lists
    nodes as dead that were removed on purpose, and dead nodes that had no GPUs.
    """
    lost: set[str] = set()
    present: set[str] = set()
    for node in nodes:
        is_lost = not node["Alive"] or (has_gpus(node) and node["NodeID"] not in answering)
        (lost if is_lost else present).add(node["NodeManagerAddress"])
    return sorted(lost - present)


def first_worker(gpus: Sequence[str], listed: str | None) -> int:
    """Return the number of the worker on the first GPU. A vLLM of one GPU on the same machine uses
    this GPU, too. `gpus` has the GPU of each worker. `listed` is the value of CUDA_VISIBLE_DEVICES,
    or None if all GPUs are used, in the order of their numbers.

    Ray promises no order in which workers get GPUs.

    >>> first_worker(["1", "0"], None), first_worker(["4", "7"], "7,4"), first_worker(["3"], "0")
    (1, 1, 0)
    """
    names = [] if listed is None else [name.strip() for name in listed.split(",")]

    def place(worker: int) -> tuple[int, int]:
        gpu = gpus[worker]
        if gpu in names:
            return 0, names.index(gpu)
        return 1, int(gpu) if gpu.isdecimal() else len(gpus)

    return min(range(len(gpus)), key=place)
