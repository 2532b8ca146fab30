"""The plan of a forward pass, as tensors on a device. The pass computes several model calls at
once. They are arranged as a forest: trees of tokens, in which calls with the same beginning share
the nodes of this beginning. Some tensors of the plan are the inputs of the pass. The others map the
outputs of the pass back to the calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fakevllm_server.forest import Forest


@dataclass(frozen=True, slots=True)
class Plan:
    """The tensors of one piece (a set of calls that go through the model together). A node is one
    token of the piece's forest, where calls with a common prefix share nodes. A head is a node that
    predicts tokens, with one temperature and one set of allowed tokens. An edge is one token that a
    head predicts. Several calls may share a head or an edge.

    No tensor is quadratic in the number of nodes, so the plans of all pieces of a training step fit
    into memory together. A plan is used for every pass over its piece: old policy, reference
    policy, and each epoch.
    """

    forest: Forest
    ids: Tensor
    """[nodes] Token ids."""
    pos: Tensor
    """[nodes] Position ids. Always pass them to the model, because the nodes are not in the order
    of a sequence."""
    head_node: Tensor
    """[heads] Nodes whose hidden states the LM head turns into logits."""
    head_temperature: Tensor
    """[heads] Sampling temperatures, as float64 on the CPU, since not every device has float64."""
    edge_head: Tensor
    """[edges] Index of the head of each edge."""
    edge_token: Tensor
    """[edges] The token id of each edge."""
    gather: Tensor
    """[trained tokens] For every trained token of every call, the index of its edge. The calls
    follow one another. If several calls train on an edge, the edge occurs once for each of them.
    The backward pass of the gather operation adds up the gradients of these calls."""
    num_trained: Sequence[int]
    """Number of trained tokens of each call."""

    @staticmethod
    def of(forest: Forest, device: torch.device | str | int = "cpu") -> Plan:
        """Return the plan for one forward pass over `forest` (model calls as trees of tokens). The
        plan's tensors are on `device`, except the temperatures."""
        edges = forest.edges
        return Plan(
            forest=forest,
            ids=as_tensor(forest.ids, device),
            pos=as_tensor(forest.pos, device),
            head_node=as_tensor(edges.head_node, device),
            head_temperature=torch.tensor(list(edges.head_temperature), dtype=torch.float64),
            edge_head=as_tensor(edges.edge_head, device),
            edge_token=as_tensor(edges.edge_token, device),
            gather=as_tensor(_concatenate(edges.per_call), device),
            num_trained=[len(call_edges) for call_edges in edges.per_call],
        )

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @property
    def num_edges(self) -> int:
        return len(self.edge_head)

    def flat(self, edge_values: Tensor) -> Tensor:
        """Convert values of shape [edges] to values of shape [trained tokens]. An edge is a
        predicted token that several calls may share. The result has the tokens of one call after
        another, in the order of the calls."""
        return edge_values.index_select(0, self.gather)

    def per_call(self, edge_values: Tensor) -> Sequence[Tensor]:
        """Convert values of shape [edges] to one tensor [trained tokens] for each call. An edge is
        a predicted token that several calls may share."""
        return self.flat(edge_values).split(list(self.num_trained))


def as_tensor(numbers: array[int], device: torch.device | str | int) -> Tensor:
    """Convert an array of 64-bit integers to a tensor on `device`."""
    if not numbers:
        return torch.empty(0, dtype=torch.long, device=device)
    return torch.frombuffer(numbers, dtype=torch.long).to(device, copy=True)


def _concatenate(arrays: Sequence[array[int]]) -> array[int]:
    flat = array("q")
    for array_of_call in arrays:
        flat.extend(array_of_call)
    return flat
