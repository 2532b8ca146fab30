"""Where workers go: how many on which node of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm_server.types.backend import BackendRefused


def spread(num_gpus_per_node: Sequence[int], num_workers: int | None) -> list[int]:
    """How many workers each used node gets: as many on each, on as few nodes as it takes. None:
    one for every GPU. Raises BackendRefused where that cannot be.

    >>> spread([8, 8], None), spread([8, 8], 4), spread([8, 8, 2], 12)
    ([8, 8], [4], [6, 6])
    """
    nodes = sorted((count for count in num_gpus_per_node if count), reverse=True)
    wanted = sum(nodes) if num_workers is None else num_workers
    for num_nodes in range(1, len(nodes) + 1):
        each, rest = divmod(wanted, num_nodes)
        if rest == 0 and 0 < each <= nodes[num_nodes - 1]:
            return [each] * num_nodes
    raise BackendRefused(
        f"{wanted} workers do not fit: they take one GPU each and as many on every node, and the "
        f"cluster's nodes have {', '.join(map(str, nodes)) or 'none'}; give --num-workers"
    )
