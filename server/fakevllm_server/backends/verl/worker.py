"""One worker (rank) of the trainer, in a Ray actor. The worker extends verl's worker: it can keep a
reference policy and export weights."""

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

from fakevllm_server.backends.verl.forest_engine import ForestEngine
from fakevllm_server.backends.verl.weight_files import write_weights

# The members of this enumeration are added at run time, so a type checker does not know them.
_dispatch: Any = Dispatch


class PolicyWorker(TinkerTrainingWorker):
    def __init__(self, config: Any) -> None:
        if get_device_name() == "cpu":
            # verl requests one backend per device and lists the CPU twice, which torch refuses.
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
    def sharing_fault(self, attention: str) -> str | None:
        """Return why an attention method that shares prefixes must not be used with this model, or
        None."""
        engine: Any = self.engine
        assert isinstance(engine, ForestEngine), "VERL_ENGINE_VENDOR must select ForestEngine"
        try:
            return engine.sharing_fault(attention)
        finally:
            self._reshard()

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def keep_reference(self) -> None:
        """Keep a copy of the current weights as the reference policy. Each rank keeps its own
        shards of the weights on the CPU."""
        self._reference = [_copy_to_cpu(shard) for shard in self._shards()]

    @register(
        dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"), blocking=False
    )
    def reference_log_probs(self, data: Any) -> Any:
        """Run verl's `infer_batch` with the weights of the reference policy. Return the output of
        `infer_batch`, which contains the log-probabilities."""
        assert self._reference is not None, "call keep_reference first"
        with self._with_weights(self._reference):
            return self.infer_batch(data)

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def export_weights(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the weights as safetensors files. All ranks take part in gathering each tensor, and
        rank 0 writes it."""
        tensors = self._named_tensors(dtype, is_kept=self.rank == 0)
        if self.rank == 0:
            write_weights(folder, tensors)
        else:
            for _ in tensors:
                pass
        torch.distributed.barrier()

    @contextmanager
    def _with_weights(self, others: Sequence[Tensor]) -> Iterator[None]:
        """Use the weights `others` within the `with` block, and restore the trained weights
        afterwards."""
        shards = self._shards()
        trained = [shard.to("cpu", copy=True) for shard in shards]
        try:
            _copy(others, shards)
            yield
        finally:
            self._reshard()
            _copy(trained, shards)

    def _shards(self) -> list[Tensor]:
        """Return this rank's shard of each parameter. The returned tensors share the memory of the
        parameters, and have no gradient."""
        self._reshard()
        with torch.no_grad():
            return [
                (weight.to_local() if isinstance(weight, DTensor) else weight).detach()
                for weight in self._module.parameters()
            ]

    def _reshard(self) -> None:
        """Free the full parameters that FSDP has gathered from all ranks for a pass.

        If a pass fails, some layers keep their gathered parameters. Without this method, the next
        pass would use these outdated copies instead of the shards.
        """
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def _module(self) -> torch.nn.Module:
        engine: Any = self.engine
        return engine.module

    def _named_tensors(self, dtype: torch.dtype, *, is_kept: bool) -> Iterator[tuple[str, Tensor]]:
        """Gather the weights from all ranks, one by one. If `is_kept` is true, yield the name and
        the full tensor of each weight, on the CPU. Otherwise only take part in the gathering, and
        yield nothing.

        The names are those in a Hugging Face model folder. If several names share one tied weight,
        the weight is yielded under one name only.
        """
        engine: Any = self.engine
        is_tied = engine.model_config.hf_config.get_text_config().tie_word_embeddings
        tied = set(getattr(engine.module, "_tied_weights_keys", None) or ()) if is_tied else set()
        for name, tensor in engine.get_per_tensor_param()[0]:
            if is_kept and name not in tied:
                kept = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
                yield name, kept.contiguous()


def _copy(values: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
    for value, shard in zip(values, shards, strict=True):
        shard.copy_(value)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """Return an exact copy of a tensor on the CPU. To save memory, the copy is in bfloat16 if
    bfloat16 represents all values exactly. The starting weights of most models are such values."""
    exact = tensor.to("cpu", copy=True)
    rounded = exact.to(torch.bfloat16)
    return rounded if torch.equal(rounded.to(exact.dtype), exact) else exact
