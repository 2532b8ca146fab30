"""The choice of the forward pass for decoding, and whether decoding uses CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

from fakevllm_server.backends.embedded.decode.cuda_graphs import GraphMaker


@dataclass(frozen=True, slots=True)
class ForwardChoice:
    is_fused: bool = True
    """Whether the fused forward pass is used, for models that have one."""
    new_graph: GraphMaker | None = None
    """Function that creates a CUDA graph for a decode iteration with the fused forward pass. None
    to decode without graphs."""

    def __str__(self) -> str:
        if not self.is_fused:
            return "the model's own forward pass"
        return "the fused forward pass" + (" in CUDA graphs" if self.new_graph else "")
