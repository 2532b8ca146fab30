"""A forest as tensors on a device: what a forward pass needs, and the way back to the calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fakevllm_server.forest import Forest


@dataclass(frozen=True, slots=True)
class Plan:
    """Of one piece. It holds no tensor that is quadratic in anything, so all pieces of a step may
    be planned at once and used for every pass over them (old, reference, each epoch).
    """

    forest: Forest
    ids: Tensor
    """[nodes]"""
    pos: Tensor
    """[nodes] Position ids. A model must always be given them: the order of nodes is no
    sequence."""
    head_node: Tensor
    """[heads] The nodes whose hidden states the LM head turns into logits."""
    head_temperature: Tensor
    """[heads], float64, on the CPU, for not every device has that."""
    edge_head: Tensor
    """[edges]"""
    edge_token: Tensor
    """[edges]"""
    gather: Tensor
    """[trained tokens] The edge of every trained token of every call, one call after another. An
    edge is in it as often as calls train on it, and the gather's gradient adds them up."""
    num_trained: Sequence[int]
    """For each call how many of those are its own."""

    @staticmethod
    def of(forest: Forest, device: torch.device | str = "cpu") -> Plan:
        edges = forest.edges
        return Plan(
            forest=forest,
            ids=as_tensor(forest.ids, device),
            pos=as_tensor(forest.pos, device),
            head_node=as_tensor(edges.head_node, device),
            head_temperature=torch.tensor(list(edges.head_temperature), dtype=torch.float64),
            edge_head=as_tensor(edges.edge_head, device),
            edge_token=as_tensor(edges.edge_token, device),
            gather=as_tensor(_joined(edges.per_call), device),
            num_trained=[len(own) for own in edges.per_call],
        )

    @property
    def device(self) -> torch.device:
        return self.ids.device

    @property
    def num_edges(self) -> int:
        return len(self.edge_head)

    def flat(self, of_edges: Tensor) -> Tensor:
        """[edges] -> [trained tokens], one call after another: what a loss takes."""
        return of_edges.index_select(0, self.gather)

    def per_call(self, of_edges: Tensor) -> Sequence[Tensor]:
        """[edges] -> for each call [its trained tokens]."""
        return self.flat(of_edges).split(list(self.num_trained))


def as_tensor(numbers: array[int], device: torch.device | str) -> Tensor:
    if not numbers:
        return torch.empty(0, dtype=torch.long, device=device)
    return torch.frombuffer(numbers, dtype=torch.long).to(device, copy=True)


def _joined(arrays: Sequence[array[int]]) -> array[int]:
    flat = array("q")
    for own in arrays:
        flat.extend(own)
    return flat
