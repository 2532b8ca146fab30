"""Known causes of a failed start of vLLM, with a fix for each cause. A text in vLLM's log
identifies the cause."""

from __future__ import annotations

import re

from fakevllm_server.backends.vllm.command import MERGED_INSTEAD

TAIL_CHARS = 20_000
"""Characters at the end of the log that are searched. vLLM logs the cause first, and then the
tracebacks of all processes that fail as a result. Therefore the searched part must be longer than
these tracebacks."""

STARTUP_ERRORS = (
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "the KV cache does not fit: lower --engine-arg=--max-model-len=N, or reserve more memory "
        "with --engine-arg=--gpu-memory-utilization=SHARE (on a CPU VLLM_CPU_KVCACHE_SPACE=GIB)",
    ),
    (
        r"less than desired GPU memory utilization",
        "other processes hold the GPU memory that vLLM needs: "
        "lower --engine-arg=--gpu-memory-utilization=SHARE",
    ),
    (
        r"out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate",
        "the model does not fit into memory: use a smaller model, or more GPUs with "
        "--engine-arg=--tensor-parallel-size=N",
    ),
    (
        r"max_model_len \(\d+\) is greater than the derived max_model_len",
        "the model supports fewer tokens: lower --engine-arg=--max-model-len=N, or the job's "
        "max_model_len",
    ),
    (
        r"Failed to infer device type",
        "vLLM is built for a GPU and finds no GPU: on a CPU use server/cpu/make_environment.sh",
    ),
    (
        r"torchvision::nms does not exist|Could not import module '\w+ForCausalLM'",
        "torch and torchvision are of different builds: pip uninstall torchvision torchaudio",
    ),
    (
        r"Cannot find any model weights|No safetensors|Error while deserializing header",
        "the model folder has no readable *.safetensors: correct --model",
    ),
    (
        r"does not support LoRA",
        f"vLLM cannot hold adapters for this model: {MERGED_INSTEAD}",
    ),
    (
        r"architectures? \[.*\].* (?:are|is) not supported|has no vLLM implementation",
        "this vLLM does not support the model's architecture: use another --model or another vLLM",
    ),
)
"""Each entry has a pattern to search for in vLLM's log, and a text with the cause and the fix. More
specific patterns are first."""


def explain_startup_error(log: str) -> str | None:
    """Return the cause of a failed start and the fix. Return None if the log shows no known cause.

    >>> explain_startup_error("ValueError: No available memory for the cache blocks.")[:26]
    'the KV cache does not fit:'
    """
    tail = log[-TAIL_CHARS:]
    return next((fix for pattern, fix in STARTUP_ERRORS if re.search(pattern, tail)), None)
