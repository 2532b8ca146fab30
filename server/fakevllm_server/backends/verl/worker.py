"""One rank of the trainer, in a Ray actor: verl's worker, and what it lacks for our server."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.device import get_device_name
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from fakevllm_server.backends.verl.weight_files import write_weights

# An enumeration that fills itself, which no type checker sees.
_dispatch: Any = Dispatch


class PolicyWorker(TinkerTrainingWorker):
    def __init__(self, config: Any) -> None:
        if get_device_name() == "cpu":
            # verl asks for a backend per device and names the CPU twice there, which torch refuses.
            torch.distributed.init_process_group(
                "gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
            )
        super().__init__(config=config)
        self._reference: list[Tensor] | None = None

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def set_grad_clip(self, grad_clip: float) -> None:
        engine: Any = self.engine
        engine.optimizer_config.clip_grad = grad_clip

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def keep_reference(self) -> None:
        """The weights as they are now; every rank keeps its own part, on the CPU."""
        self._reference = [_on_cpu(part) for part in self._parts()]

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False
    )
    def reference_log_probs(self, data: Any) -> Any:
        """As `infer_batch`, of the weights that were kept."""
        assert self._reference is not None, "keep_reference comes first"
        with self._weights_of(self._reference):
            return self.infer_batch(data)

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def export_weights(self, folder: Path, dtype: torch.dtype) -> None:
        """Every rank takes part in gathering each tensor; the first writes."""
        tensors = self._named_tensors(dtype, is_kept=self.rank == 0)
        if self.rank == 0:
            write_weights(folder, tensors)
        else:
            for _ in tensors:
                pass
        torch.distributed.barrier()

    @contextmanager
    def _weights_of(self, others: Sequence[Tensor]) -> Iterator[None]:
        parts = self._parts()
        trained = [part.to("cpu", copy=True) for part in parts]
        try:
            _copy(others, parts)
            yield
        finally:
            self._let_go()
            _copy(trained, parts)

    def _parts(self) -> list[Tensor]:
        """Of each parameter what this rank holds, in place and outside any graph."""
        self._let_go()
        with torch.no_grad():
            return [
                (one.to_local() if isinstance(one, DTensor) else one).detach()
                for one in self._module.parameters()
            ]

    def _let_go(self) -> None:
        """A pass that failed leaves layers gathered: their parameters are then copies of all ranks'
        parts, which the next pass takes for the weights."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def _module(self) -> torch.nn.Module:
        engine: Any = self.engine
        return engine.module

    def _named_tensors(self, dtype: torch.dtype, *, is_kept: bool) -> Iterator[tuple[str, Tensor]]:
        """By their names in a Hugging Face folder, tied ones once, on the CPU where kept."""
        engine: Any = self.engine
        is_tied = engine.model_config.hf_config.get_text_config().tie_word_embeddings
        tied = set(getattr(engine.module, "_tied_weights_keys", None) or ()) if is_tied else set()
        for name, tensor in engine.get_per_tensor_param()[0]:
            if is_kept and name not in tied:
                kept = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
                yield name, kept.contiguous()


def _copy(values: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for value, part in zip(values, parts, strict=True):
        part.copy_(value)


def _on_cpu(tensor: Tensor) -> Tensor:
    """A copy to the bit; in bfloat16 where that holds it, as it does for most models' weights."""
    whole = tensor.to("cpu", copy=True)
    half = whole.to(torch.bfloat16)
    return half if torch.equal(half.to(whole.dtype), whole) else whole
