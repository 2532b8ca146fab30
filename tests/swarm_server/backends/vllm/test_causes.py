"""What a vLLM wrote before it ended, in words that say what to do."""

from __future__ import annotations

import pytest

from fakevllm_server.backends.vllm.causes import CAUSES, TAIL_CHARS, cause_in

LOGS = {
    "lower --engine-arg=--max-model-len": "ValueError: No available memory for the cache blocks. "
    "Try increasing `gpu_memory_utilization` when initializing the engine.",
    "others hold the memory": "ValueError: Free memory on device cuda:0 (3.2/79.1 GiB) on startup "
    "is less than desired GPU memory utilization (0.92, 72.8 GiB).",
    "does not fit into memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 G",
    "made for fewer tokens": "User-specified max_model_len (99999) is greater than the derived "
    "max_model_len (max_position_embeddings=512)",
    "server/cpu/make_environment.sh": "RuntimeError: Failed to infer device type",
    "pip uninstall torchvision": "RuntimeError: operator torchvision::nms does not exist",
    "mend --model": "RuntimeError: Cannot find any model weights with `/models/x`",
    "does not know the model's architecture": "Model architectures ['OddForCausalLM'] are not "
    "supported for now.",
}


@pytest.mark.parametrize(("told", "log"), LOGS.items())
def test_a_known_end_is_told_with_what_to_do_whatever_tracebacks_follow(
    told: str, log: str
) -> None:
    assert told in (cause_in(f"INFO up\n{log}\nTraceback\n  File engine.py\n") or "")


def test_every_known_end_has_its_example() -> None:
    assert len(LOGS) == len(CAUSES)


def test_an_unknown_end_and_one_of_long_ago_are_not_guessed_at() -> None:
    assert cause_in("RuntimeError: Engine core initialization failed.") is None
    assert cause_in("CUDA out of memory" + " " * TAIL_CHARS) is None
