"""One worker (rank) of the trainer, in a Ray actor. The worker extends verl's worker: it can train
LoRA adapters like the embedded trainer, compute a reference policy, and export weights."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.utils.device import get_device_name, get_nccl_backend, get_torch_device
from verl.workers.engine_workers_tinker import TinkerTrainingWorker

from fakevllm_server.backends.embedded.lora import insert_adapters, without_adapters
from fakevllm_server.backends.embedded.train.checkpoint import write_adapters
from fakevllm_server.backends.embedded.weights import adapters_of
from fakevllm_server.backends.training.lora_settings import LoraSettings
from fakevllm_server.backends.verl.checkpoint_state import WorkerState
from fakevllm_server.backends.verl.forest_engine import ForestEngine
from fakevllm_server.backends.verl.trainer_arguments import COLLECTIVE_TIMEOUT_S, send_timeout_s
from fakevllm_server.backends.verl.weight_export import FolderWeights, gather, write_weights
from fakevllm_server.backends.verl.weight_sending import (
    GatheredWeights,
    changed_timeout,
    send_together,
)
from fakevllm_server.backends.weight_transfer.sender import Sender
from fakevllm_server.backends.weight_transfer.weight_source import WeightSource, check_names
from fakevllm_server.types.backend import PolicyName
from fakevllm_server.types.weight_transfer import TransferTarget

# The members of this enumeration are added at run time, so a type checker does not know them.
_dispatch: Any = Dispatch


class PolicyWorker(TinkerTrainingWorker):
    def __init__(
        self,
        config: Any,
        lora: LoraSettings | None = None,
        lora_seed: int = 0,
        collective_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> None:
        """Create the worker. If `lora` is not None, the worker trains LoRA adapters with these
        settings, which `config` must contain too. `lora_seed` is the random seed for the initial
        values of the adapters. A worker waits at most `collective_timeout_s` seconds for another
        one, and fails then."""
        # verl sets no timeout. For the CPU, it lists one backend twice, which torch refuses.
        device = get_device_name()
        torch.distributed.init_process_group(
            "gloo" if device == "cpu" else f"cpu:gloo,{device}:{get_nccl_backend()}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timedelta(seconds=collective_timeout_s),
        )
        super().__init__(config=config)
        self._lora = lora
        self._lora_seed = lora_seed
        # verl's own method names the adapters after a wrapper, and has no seed.
        engine: Any = self.engine
        engine._build_lora_module = self._insert_adapters
        self._reference: list[Tensor] | None = None
        self._sender = Sender()
        self._collective_timeout_s = collective_timeout_s

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def process_id(self) -> int:
        return os.getpid()

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def node_address(self) -> str:
        return ray.util.get_node_ip_address()

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
        `infer_batch`, which contains the log-probabilities.

        With LoRA, the reference policy is the model without its adapters.
        """
        if self._lora is not None:
            with without_adapters(self._module):
                return self.infer_batch(data)
        assert self._reference is not None, "call keep_reference first"
        with self._with_weights(self._reference):
            return self.infer_batch(data)

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def save_state(self, folder: Path) -> None:
        """Write weights, optimizer state and random states to a checkpoint, as `WorkerState`
        describes."""
        with self._state() as state:
            state.save(folder)

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def restore_state(self, folder: Path) -> str | None:
        """Load a checkpoint. Return None, or why the checkpoint does not fit the model."""
        with self._state() as state:
            return state.restore(folder)

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def export_weights(self, folder: Path, dtype: torch.dtype, is_gathered: bool) -> None:
        """Write the weights as safetensors files, as the function `write_weights` describes."""
        with self._on_device():
            weights = FolderWeights(self._module, dtype)
            write_weights(weights, folder, is_gathered=is_gathered)

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def send_weights(
        self, target: TransferTarget, dtype: torch.dtype, folder: Path, sender: int
    ) -> str | None:
        """Gather the weights on all ranks, and send them to vLLM from the rank `sender`, with LoRA
        adapters merged. `folder` is the model folder. Return why sending failed, or None."""

        def send(source: WeightSource) -> None:
            check_names((one.name for one in source.metadata()), folder)
            self._sender.send(source, target)

        usual_s = self._collective_timeout_s
        with self._on_device(), changed_timeout(send_timeout_s(usual_s), usual_s=usual_s):
            weights = GatheredWeights(FolderWeights(self._module, dtype))
            return send_together(weights, send if self.rank == sender else None)

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def free_cache(self) -> None:
        """Give the memory that torch keeps for later back to the GPU, so that a vLLM on the same
        GPU can use it. On a CPU, do nothing."""
        get_torch_device().empty_cache()

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def gpu(self) -> str:
        """Return the GPU of this rank, as CUDA_VISIBLE_DEVICES names it. The GPUs of a rank on a
        CPU do not exist, and are numbered too."""
        return str(ray.get_gpu_ids()[0])

    @register(dispatch_mode=_dispatch.ONE_TO_ALL)
    def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        """Write the LoRA adapters in the layout of the peft library, as `write_adapters`
        describes. All ranks take part in gathering each tensor, and rank 0 writes all of them."""
        assert self._lora is not None, "the worker trains no adapters"
        with self._on_device():
            layers = {
                layer: (
                    gather(adapter.lora_A[adapter.active_adapters[0]].weight),
                    gather(adapter.lora_B[adapter.active_adapters[0]].weight),
                )
                for layer, adapter in adapters_of(self._module).items()
            }
        if self.rank == 0:
            write_adapters(folder, layers, self._lora, policy)
        torch.distributed.barrier()

    def _insert_adapters(self, module: PreTrainedModel) -> PreTrainedModel:
        """Insert the LoRA adapters into a model that is not sharded yet, and return the model."""
        assert self._lora is not None, "the worker trains no adapters"
        insert_adapters(module, self._lora, self._lora_seed)
        return module

    @contextmanager
    def _state(self) -> Iterator[WorkerState]:
        """Keep weights and optimizer state on the device within the `with` block, and yield
        them."""
        engine: Any = self.engine
        with engine.train_mode(zero_grad_on_exit=False), torch.no_grad():
            self._reshard()
            yield WorkerState(self._module, engine.optimizer, self.rank)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Free what FSDP has gathered, and keep the shards on the device within the `with` block.
        Only there can ranks exchange them. With `--cpu-offload`, the shards are on the CPU
        otherwise. At the end of the block, free what torch has cached."""
        engine: Any = self.engine
        try:
            with engine.eval_mode(), torch.no_grad():
                self._reshard()
                # verl may still be copying the shards to the GPU, on the default stream. vLLM's
                # code for NCCL reads them on other streams.
                get_torch_device().synchronize()
                yield
        finally:
            self.free_cache()

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
            # With `--cpu-offload`, the pass has moved the parameters to new memory.
            _copy(trained, self._shards())

    def _shards(self) -> list[Tensor]:
        """Return this rank's shard of each parameter. The returned tensors share the memory of the
        parameters, and have no gradient."""
        self._reshard()
        # With `--cpu-offload`, verl may still be copying the shards to the CPU.
        get_torch_device().synchronize()
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
    def _module(self) -> PreTrainedModel:
        engine: Any = self.engine
        return engine.module


def _copy(values: Sequence[Tensor], shards: Sequence[Tensor]) -> None:
    for value, shard in zip(values, shards, strict=True):
        shard.copy_(value)


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """Return an exact copy of a tensor on the CPU. To save memory, the copy is in bfloat16 if
    bfloat16 represents all values exactly. The starting weights of most models are such values."""
    exact = tensor.to("cpu", copy=True)
    rounded = exact.to(torch.bfloat16)
    return rounded if torch.equal(rounded.to(exact.dtype), exact) else exact
