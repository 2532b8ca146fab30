"""One rank of the trainer, in a Ray actor: verl's worker, and what it lacks for our server."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.single_controller.base.decorator import Dispatch, register
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

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def set_grad_clip(self, grad_clip: float) -> None:
        engine: Any = self.engine
        engine.optimizer_config.clip_grad = grad_clip

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

    def _named_tensors(self, dtype: torch.dtype, *, is_kept: bool) -> Iterator[tuple[str, Tensor]]:
        """By their names in a Hugging Face folder, tied ones once, on the CPU where kept."""
        engine: Any = self.engine
        is_tied = engine.model_config.hf_config.get_text_config().tie_word_embeddings
        tied = set(getattr(engine.module, "_tied_weights_keys", None) or ()) if is_tied else set()
        for name, tensor in engine.get_per_tensor_param()[0]:
            if is_kept and name not in tied:
                kept = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None)
                yield name, kept.contiguous()
