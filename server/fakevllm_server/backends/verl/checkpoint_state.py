"""Save and restore the state of the workers in torch's distributed checkpoint format. Any number of
workers can restore a checkpoint, whatever number of workers has saved it.

    weights.<name>           float32; with LoRA only the adapters
    optimizer.<slot>.<name>  AdamW's state: `exp_avg`, `exp_avg_sq` and `step`
    random.<rank>.<device>   state of the random number generators of each worker

Checkpoints of version 0.8.0 and older are read too (`released_checkpoint`).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from transformers import PreTrainedModel
from verl.utils.device import get_torch_device

from fakevllm_server.backends.embedded.weights import named_weights
from fakevllm_server.backends.verl.released_checkpoint import ReleasedCheckpoint
from fakevllm_server.backends.verl.trainer_arguments import STATE_FOLDER

OTHER_MODEL = "is of another model than --model"


class WorkerState:
    """The state of one worker. All workers must call each method together."""

    def __init__(self, module: PreTrainedModel, optimizer: Optimizer, rank: int) -> None:
        self._module = module
        self._optimizer = optimizer
        self._rank = rank

    def save(self, folder: Path) -> None:
        """Write a checkpoint to a folder. Each worker writes its own part of each tensor."""
        moments = {
            _moment_name(slot, name): tensor
            for name, parameter in self._module.named_parameters()
            for slot, tensor in self._optimizer.state.get(parameter, {}).items()
        }
        state = self._weights() | moments | self._random_states()
        save(state, checkpoint_id=folder / STATE_FOLDER)

    def restore(self, folder: Path) -> str | None:
        """Load a checkpoint. Return None, or why the checkpoint does not fit the model. In the
        latter case, nothing changes."""
        if ReleasedCheckpoint.is_in(folder):
            names = [name for name, _ in self._module.named_parameters()]
            released = ReleasedCheckpoint(folder, names)
            return self._restore(released.shapes, released.load)
        reader = FileSystemReader(folder / STATE_FOLDER)
        saved: Any = reader.read_metadata().state_dict_metadata
        return self._restore(
            {name: entry.size for name, entry in saved.items()},
            lambda state: load(state, storage_reader=reader),
        )

    def _restore(self, saved: Mapping[str, torch.Size], fill: Any) -> str | None:
        """Restore a checkpoint with the tensors `saved`, which are given by name and shape.
        `fill(state)` fills the tensors of a dict with the values of the checkpoint."""
        weights = self._weights()
        if not self._fits(saved, weights):
            return OTHER_MODEL
        self._optimizer.state.clear()  # so that its memory can be used
        moments = self._empty_moments(saved)
        state = weights | {
            _moment_name(slot, name): tensor
            for name, slots in moments.items()
            for slot, tensor in slots.items()
        }
        random = self._random_states()
        is_known = all(saved.get(name) == tensor.shape for name, tensor in random.items())
        fill(state | random if is_known else state)
        for name, parameter in self._module.named_parameters():
            if name in moments:
                self._optimizer.state[parameter] = moments[name]
        if is_known:
            cpu, device = random.values()
            torch.set_rng_state(cpu)
            get_torch_device().set_rng_state(device)
        return None

    def _fits(self, saved: Mapping[str, torch.Size], weights: Mapping[str, Tensor]) -> bool:
        """Return True if a checkpoint with the tensors `saved` has `weights`, and no weight that
        the model lacks. Released checkpoints have each of several tied weights."""
        own = {f"weights.{name}": one.shape for name, one in self._module.state_dict().items()}
        shapes = {name: shape for name, shape in saved.items() if name.startswith("weights.")}
        return weights.keys() <= shapes.keys() and shapes.items() <= own.items()

    def _weights(self) -> dict[str, Tensor]:
        """Return the weights that belong in a checkpoint. With LoRA, these are the adapters."""
        named = named_weights(self._module)
        has_adapters = any(not weight.requires_grad for weight in self._module.parameters())
        return {
            f"weights.{name}": tensor.detach()
            for name, tensor in named.items()
            if tensor.requires_grad or not has_adapters
        }

    def _empty_moments(self, saved: Mapping[str, torch.Size]) -> dict[str, dict[str, Tensor]]:
        """Return new tensors for AdamW's state, by parameter and slot. A parameter without state in
        the checkpoint has none."""
        slots = {"exp_avg": torch.zeros_like, "exp_avg_sq": torch.zeros_like, "step": _zero}
        return {
            name: {slot: make(parameter.detach()) for slot, make in slots.items()}
            for name, parameter in self._module.named_parameters()
            if _moment_name("step", name) in saved
        }

    def _random_states(self) -> dict[str, Tensor]:
        return {
            f"random.{self._rank}.cpu": torch.get_rng_state(),
            f"random.{self._rank}.device": get_torch_device().get_rng_state(),
        }


def _moment_name(slot: str, parameter: str) -> str:
    return f"optimizer.{slot}.{parameter}"


def _zero(_: Tensor) -> Tensor:
    """Return a count of steps. AdamW keeps such counts on the CPU."""
    return torch.zeros(())
