"""Why a vLLM did not come up, by what it wrote into its log, and what to do. Pure."""

from __future__ import annotations

import re

TAIL_CHARS = 20_000
"""The reason stands above the tracebacks of all processes that it ended."""

CAUSES = (
    (
        r"No available memory for the cache blocks|larger than the available KV cache memory",
        "its KV cache does not fit: lower --engine-arg=--max-model-len=N, or give it more with "
        "--engine-arg=--gpu-memory-utilization=SHARE (on a CPU VLLM_CPU_KVCACHE_SPACE=GIB)",
    ),
    (
        r"less than desired GPU memory utilization",
        "others hold the memory it was to have: lower --engine-arg=--gpu-memory-utilization=SHARE",
    ),
    (
        r"out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate",
        "the model does not fit into memory: take a smaller one, or more GPUs with "
        "--engine-arg=--tensor-parallel-size=N",
    ),
    (
        r"max_model_len \(\d+\) is greater than the derived max_model_len",
        "the model was made for fewer tokens: lower --engine-arg=--max-model-len=N, or the job's "
        "max_model_len",
    ),
    (
        r"Failed to infer device type",
        "this vLLM is built for a GPU and finds none: on a CPU use server/cpu/make_environment.sh",
    ),
    (
        r"torchvision::nms does not exist|Could not import module '\w+ForCausalLM'",
        "torch and torchvision are of different builds: pip uninstall torchvision torchaudio",
    ),
    (
        r"Cannot find any model weights|No safetensors|Error while deserializing header",
        "the model folder lacks readable *.safetensors: mend --model",
    ),
    (
        r"architectures? \[.*\].* (?:are|is) not supported|has no vLLM implementation",
        "this vLLM does not know the model's architecture: take another --model or vLLM",
    ),
)
"""Patterns in vLLM's log, the more telling first -> what it means and what to do."""


def cause_in(log: str) -> str | None:
    """
    >>> cause_in("ValueError: No available memory for the cache blocks.")[:27]
    'its KV cache does not fit: '
    """
    tail = log[-TAIL_CHARS:]
    return next((told for pattern, told in CAUSES if re.search(pattern, tail)), None)
