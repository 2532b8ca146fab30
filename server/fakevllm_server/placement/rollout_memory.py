"""The memory of the rollout engine on one GPU: vLLM, or the sampler of the embedded engine.

vLLM takes a share of the GPU (`--gpu-memory-utilization`). What its weights and its working memory
leave of this share is its KV cache. So the question is how many tokens the cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass

from fakevllm_server.placement.memory_parts import GIB, MemoryPart
from fakevllm_server.placement.model_shape import ModelShape

VLLM_CUDA_BYTES = 2 * GIB
"""Memory of one vLLM process for CUDA's context, CUDA graphs and NCCL. It is an estimate."""
SAMPLER_BYTES_PER_LOGIT = 12
"""Bytes for each logit in vLLM's sampler: the logit and its log-probability in float32, and a copy
for sorting."""
LARGE_GPU_BYTES = 70 * GIB
"""From this memory on, vLLM's default limits for one batch are those for large GPUs."""
LARGE_LIMITS, SMALL_LIMITS = (1024, 8192), (256, 2048)
"""vLLM's defaults of (`--max-num-seqs`, `--max-num-batched-tokens`)."""
EMBEDDED_CACHE_SHARE, EMBEDDED_PREFIX_SHARE = 0.15, 0.04
"""Shares of the GPU's memory that the embedded engine may use for running answers and for its
prefix cache. They are constants in `backends/embedded/engine`, which needs torch."""


@dataclass(frozen=True, slots=True)
class RolloutSetup:
    """The settings on which the rollout engine's memory depends."""

    gpu_bytes: int
    """Memory of one GPU."""
    max_model_len: int
    """Maximum number of tokens of prompt and answer together."""
    tensor_parallel: int = 1
    utilization: float = 0.92
    """vLLM's share of the memory. The default is vLLM's."""
    number_bytes: int = 2
    """Bytes of a weight, and of a value in the KV cache."""
    max_num_seqs: int | None = None
    """Maximum number of answers at a time; None means the engine's default."""
    max_batched_tokens: int | None = None
    adapter_rank: int = 0
    """Rank of the LoRA adapters that vLLM holds; 0 if it holds none."""
    num_adapters: int = 0
    """Number of adapters in vLLM's GPU memory."""

    @property
    def budget_bytes(self) -> int:
        """Bytes that vLLM may use on one GPU."""
        return int(self.utilization * self.gpu_bytes)


def kv_bytes_per_token(shape: ModelShape, setup: RolloutSetup) -> int:
    """Return the bytes of one token in the KV cache of one GPU."""
    heads = -(-shape.num_kv_heads // setup.tensor_parallel)
    return 2 * shape.num_layers * heads * shape.head_dim * setup.number_bytes


def vllm_parts(shape: ModelShape, setup: RolloutSetup) -> list[MemoryPart]:
    """Return the parts of the memory of one GPU of vLLM. The KV cache is the rest of vLLM's share,
    and may be 0."""
    gpus = f" / {setup.tensor_parallel} GPUs" if setup.tensor_parallel > 1 else ""
    count, number = shape.num_parameters, setup.number_bytes
    parts = [
        MemoryPart(
            "weights",
            -(-number * count // setup.tensor_parallel),
            f"{number} bytes x {count:,} parameters{gpus}",
        )
    ]
    if setup.adapter_rank:
        one = shape.adapter_parameters(setup.adapter_rank, "all-linear")
        parts.append(
            MemoryPart(
                "adapters",
                number * one * setup.num_adapters,
                f"{setup.num_adapters} adapters x {number} bytes x {one:,} parameters",
            )
        )
    parts += [_working_memory(shape, setup), MemoryPart("CUDA", VLLM_CUDA_BYTES, "estimate")]
    used = sum(part.num_bytes for part in parts)
    rest = max(0, setup.budget_bytes - used)
    per_token = kv_bytes_per_token(shape, setup)
    parts.append(
        MemoryPart(
            "KV cache",
            rest,
            f"the rest of {setup.utilization:g} x GPU: {rest // per_token:,} tokens x "
            f"{per_token:,} bytes",
        )
    )
    return parts


def _working_memory(shape: ModelShape, setup: RolloutSetup) -> MemoryPart:
    limits = LARGE_LIMITS if setup.gpu_bytes >= LARGE_GPU_BYTES else SMALL_LIMITS
    answers = setup.max_num_seqs or limits[0]
    tokens = setup.max_batched_tokens or limits[1]
    logits = SAMPLER_BYTES_PER_LOGIT * answers * shape.vocab_size
    inner = -(-shape.intermediate_size // setup.tensor_parallel)
    per_token = setup.number_bytes * (4 * shape.hidden_size + 3 * inner)
    return MemoryPart(
        "working memory",
        logits + tokens * per_token,
        f"{SAMPLER_BYTES_PER_LOGIT} bytes x {answers:,} answers x {shape.vocab_size:,} logits + "
        f"{tokens:,} tokens x {per_token:,} bytes",
    )


def embedded_sampler_parts(
    shape: ModelShape, setup: RolloutSetup, *, shares_weights: bool
) -> list[MemoryPart]:
    """Return the parts of the memory of the embedded engine's sampler. If `shares_weights` is true,
    the sampler uses the trainer's weights."""
    per_token, answers = kv_bytes_per_token(shape, setup), setup.max_num_seqs or 64
    wanted = answers * setup.max_model_len * per_token
    limit = int(EMBEDDED_CACHE_SHARE * setup.gpu_bytes)
    formula = f"{answers} answers x {setup.max_model_len:,} tokens x {per_token:,} bytes"
    if wanted > limit:
        formula = (
            f"{EMBEDDED_CACHE_SHARE:g} x GPU: {limit // per_token:,} tokens x {per_token:,} bytes"
        )
    prefix = int(EMBEDDED_PREFIX_SHARE * setup.gpu_bytes)
    parts = [
        MemoryPart("KV cache", min(wanted, limit), formula),
        MemoryPart("prefix cache", prefix, f"{EMBEDDED_PREFIX_SHARE:g} x GPU"),
    ]
    if not shares_weights:
        count, number = shape.num_parameters, setup.number_bytes
        weights = MemoryPart(
            "sampler's weights", number * count, f"{number} bytes x {count:,} parameters"
        )
        parts.insert(0, weights)
    return parts
