"""Choose the device and the dtype in which the embedded engine computes."""

from __future__ import annotations

import torch

from fakevllm_server.types.backend import BackendError


def resolve_device(name: str) -> torch.device:
    """Return the torch device for a value of the flag `--device`. `auto` means CUDA if available,
    else MPS, else the CPU. Raises BackendError if the value is `cuda` and torch finds no CUDA GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendError("--device=cuda, and torch finds no CUDA GPU: leave --device out")
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype for a value of the flag `--dtype`. The sampler and the trainer compute
    in this dtype. The sampler's weights have this dtype too, but the trainer's weights stay in
    float32.

    `auto` means bfloat16 on CUDA and float32 on other devices. On a CPU, bfloat16 is slower and
    less exact.
    """
    if name != "auto":
        return getattr(torch, name)
    return torch.bfloat16 if device.type == "cuda" else torch.float32
