"""Run a decode iteration on CUDA as a graph. Torch records the kernels of one iteration. In later
iterations, one call starts all of these kernels.

In an iteration of a small model, a GPU waits for Python most of the time. A graph has fixed shapes
and addresses. Therefore there is one graph for each number of rows and each size of the KV cache's
buffers. Data that change from iteration to iteration are copied into tensors whose addresses stay
the same.

The logic is tested on a CPU with a recorder of torch's operations in place of a CUDA graph, and on
a GPU with CUDA graphs. The check at start-up (`decoding_check`) decodes with graphs. If graphs fail
or give other logits, the check turns them off.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fakevllm_server.backends.embedded.decode.fused_forward import FusedForward
from fakevllm_server.backends.embedded.decode.kv_cache import KvCache

MAX_GRAPHS = 128
"""Maximum number of graphs. Before a further graph is stored, all graphs are dropped, and each is
recorded again at its next use. Each number of rows has a graph of its own."""


class Graph(Protocol):
    """A replayable recording of operations on tensors."""

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        """Call `run`, and record its operations on tensors. Return the result of `run`. A later
        `replay` writes its result into the same tensor."""
        ...

    def replay(self) -> None: ...


class CudaGraph:
    """A recording of CUDA kernels that are later launched together (torch.cuda.CUDAGraph)."""

    def __init__(self) -> None:
        self._graph: Any = torch.cuda.CUDAGraph()

    def record(self, run: Callable[[], Tensor]) -> Tensor:
        # The first run allocates the workspaces of libraries, which cannot be recorded.
        stream: Any = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self._graph):
            return run()

    def replay(self) -> None:
        self._graph.replay()


GraphMaker = Callable[[], Graph]


def graph_maker(device: torch.device) -> GraphMaker | None:
    """Return the class that records graphs on `device`. Return None if graphs are not supported on
    the device."""
    return CudaGraph if device.type == "cuda" and torch.cuda.is_available() else None


class _Recorded(NamedTuple):
    graph: Graph
    inputs: tuple[Tensor, ...]
    logits: Tensor


class GraphedForward:
    """A fused forward pass that runs as a CUDA graph. It computes one token per row (running
    request). No two rows may share the cache of a prompt."""

    def __init__(self, fused: FusedForward, max_length: int, new_graph: GraphMaker) -> None:
        self._fused = fused
        self._new_graph = new_graph
        self._recorded: dict[tuple[object, ...], _Recorded] = {}
        # If the table grew later, recorded graphs would still use the address of the old table.
        fused.reserve_angles(max_length)

    def logits(self, ids: Tensor, positions: Tensor, cache: KvCache) -> Tensor:
        """Compute the same logits as `FusedForward.logits`, but by replaying a graph."""
        assert not cache.shared_rows, "a graph has fixed shapes"
        inputs = (ids, positions, cache.own_positions, cache.cells)
        # A recorded graph can be replayed only if the cache's buffers still have the recorded
        # addresses.
        addresses = cache.keys.data_ptr(), cache.values.data_ptr()
        key = (len(ids), cache.width, cache.keys.shape, *addresses)
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._record(inputs, cache)
            if len(self._recorded) >= MAX_GRAPHS:
                self._recorded.clear()
            self._recorded[key] = recorded
        for static, current in zip(recorded.inputs, inputs, strict=True):
            static.copy_(current)
        recorded.graph.replay()
        return recorded.logits

    def _record(self, inputs: tuple[Tensor, ...], cache: KvCache) -> _Recorded:
        ids, positions, own_positions, cells = (tensor.clone() for tensor in inputs)
        graph = self._new_graph()
        cache.own_positions, cache.cells = own_positions, cells
        logits = graph.record(lambda: self._fused.logits(ids, positions, cache))
        return _Recorded(graph, (ids, positions, own_positions, cells), logits)
