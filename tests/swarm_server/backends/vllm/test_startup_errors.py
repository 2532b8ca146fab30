"""Known causes of a failed start, recognized in vLLM's log."""

from __future__ import annotations

import pytest

from fakevllm_server.backends.vllm.startup_errors import (
    STARTUP_ERRORS,
    TAIL_CHARS,
    explain_startup_error,
)

LOGS = {
    "lower --engine-arg=--max-model-len": "ValueError: No available memory for the cache blocks. "
    "Try increasing `gpu_memory_utilization` when initializing the engine.",
    "other processes hold the GPU memory": "ValueError: Free memory on device cuda:0 (3.2/79.1 "
    "GiB) on startup is less than desired GPU memory utilization (0.92, 72.8 GiB).",
    "does not fit into memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 G",
    "supports fewer tokens": "User-specified max_model_len (99999) is greater than the derived "
    "max_model_len (max_position_embeddings=512)",
    "server/cpu/make_environment.sh": "RuntimeError: Failed to infer device type",
    "pip uninstall torchvision": "RuntimeError: operator torchvision::nms does not exist",
    "correct --model": "RuntimeError: Cannot find any model weights with `/models/x`",
    "leave --engine-arg=--enable-lora out": "ValueError: OddForCausalLM does not support LoRA yet.",
    "does not support the model's architecture": "Model architectures ['OddForCausalLM'] are not "
    "supported for now.",
}


@pytest.mark.parametrize(("fix", "log"), LOGS.items())
def test_a_known_cause_is_explained_with_its_fix_even_if_tracebacks_follow(
    fix: str, log: str
) -> None:
    assert fix in (explain_startup_error(f"INFO up\n{log}\nTraceback\n  File engine.py\n") or "")


def test_every_known_cause_has_an_example() -> None:
    assert len(LOGS) == len(STARTUP_ERRORS)


def test_an_unknown_cause_and_an_old_log_line_give_no_explanation() -> None:
    assert explain_startup_error("RuntimeError: Engine core initialization failed.") is None
    assert explain_startup_error("CUDA out of memory" + " " * TAIL_CHARS) is None
