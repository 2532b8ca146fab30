"""Where a model lies and in which type it is served."""

from __future__ import annotations

from typing import Any

import torch

from fakevllm_server.backends.base import BackendError


def device_named(name: str) -> torch.device:
    """`auto` is the first accelerator, or the CPU. Raises BackendError where there is no such."""
    if name == "cuda" and not torch.cuda.is_available():
        raise BackendError("--device=cuda, and torch finds no CUDA GPU: leave --device out")
    if name != "auto":
        return torch.device(name)
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def served_dtype(name: str, device: torch.device, stored: Any) -> torch.dtype:
    """On CPU bf16 is slower and less exact than float32; elsewhere the model's own type."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda" and stored in (torch.bfloat16, torch.float16):
        return stored
    return torch.float32
