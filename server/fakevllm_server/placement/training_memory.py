"""The memory of the trainer on one GPU.

The sizes are those that the embedded trainer and verl's FSDP2 workers really hold:

* Weights, gradients and AdamW's two moments are float32 (`backends/verl/worker_config`,
  `backends/embedded/train`).
* verl divides them among its workers. Gradients are divided after every pass.
* The embedded trainer has one GPU. In bfloat16, autocast keeps bfloat16 copies of the weights
  during a pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from fakevllm_server.placement.memory_parts import GIB, MemoryPart
from fakevllm_server.placement.model_shape import ModelShape

FLOAT32, BFLOAT16 = 4, 2
MAX_LOGITS = 2**26
"""Maximum number of logits that the embedded trainer holds at a time. It is the constant of the
same name in `backends/embedded/train/forward_backward`, which needs torch."""
EMBEDDED_BYTES_PER_LOGIT = 24
"""Bytes for each of these logits in a backward pass: the logit in bfloat16 and in float32 (6),
divided by the temperature (4), its probability (4), and the gradients of the first three (10)."""
VERL_BYTES_PER_LOGIT = 14
"""Bytes for each logit in verl's backward pass: the logit in bfloat16, before and after the
division by the temperature (4), its float32 log-probability (4), and the gradients of the
log-probability (4) and of the logit (2)."""
GATHERED_BYTES = 10
"""Bytes for each parameter of the layer that FSDP2 has gathered: two layers in bfloat16, because
the next one is prefetched (4), and one layer's gradient in bfloat16 (2) and in float32 (4)."""
EMBEDDED_CUDA_BYTES, VERL_CUDA_BYTES = 1 * GIB, 2 * GIB
"""Memory of one process for CUDA's context and kernels and, with verl, for NCCL's buffers. It is an
estimate: nobody has measured it with these trainers."""


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """The settings on which the trainer's memory depends."""

    is_verl: bool
    num_gpus: int
    pass_tokens: int
    """Number of tokens in a forward pass (`micro_batch_tokens`)."""
    compute_bytes: int = BFLOAT16
    """Bytes of a number in matrix products."""
    is_recomputed: bool = False
    """Whether layers keep only their input and compute their activations again (gradient
    checkpointing)."""
    lora_rank: int = 0
    target_modules: str = "all-linear"
    needs_reference: bool = False
    """Whether the job compares the policy with the starting weights."""
    is_gathered: bool = False
    """Whether verl's first worker gathers each weight when it exports them. It does so if the
    workers are on several nodes. Otherwise, each worker writes its own rows."""


def training_parts(shape: ModelShape, setup: TrainingSetup) -> list[MemoryPart]:
    """Return the parts of the memory of one training GPU."""
    cuda = VERL_CUDA_BYTES if setup.is_verl else EMBEDDED_CUDA_BYTES
    parts = [*_state_parts(shape, setup)]
    parts.append(MemoryPart("CUDA", cuda, "estimate for one process"))
    if setup.is_verl:
        parts += _gathered_parts(shape, setup)
    elif setup.compute_bytes == BFLOAT16:
        parts.append(
            MemoryPart(
                "bfloat16 weights",
                BFLOAT16 * shape.num_parameters,
                f"2 bytes x {shape.num_parameters:,} parameters, copied by autocast",
                "passes",
            )
        )
    parts += [_activations(shape, setup), _logits(shape, setup)]
    return parts


def _state_parts(shape: ModelShape, setup: TrainingSetup) -> list[MemoryPart]:
    """Return the weights, and what the optimizer holds for each trained parameter."""
    num_all = num_trained = shape.num_parameters
    if setup.lora_rank:
        num_trained = shape.adapter_parameters(setup.lora_rank, setup.target_modules)
        num_all += num_trained
    gpus = f" / {setup.num_gpus} GPUs" if setup.is_verl else ""
    divisor = setup.num_gpus if setup.is_verl else 1
    trained = "adapter parameters" if setup.lora_rank else "parameters"

    def share(num_bytes: int, count: int) -> int:
        return -(-num_bytes * count // divisor)

    parts = [
        MemoryPart("weights", share(4, num_all), f"4 bytes x {num_all:,} parameters{gpus}"),
        MemoryPart(
            "gradients", share(4, num_trained), f"4 bytes x {num_trained:,} {trained}{gpus}"
        ),
        MemoryPart(
            "optimizer",
            share(8, num_trained),
            f"2 moments x 4 bytes x {num_trained:,} {trained}{gpus}",
        ),
        MemoryPart(
            "update buffer",
            share(4, num_trained),
            f"4 bytes x {num_trained:,} {trained}{gpus}, while AdamW updates",
            "update",
        ),
    ]
    # The embedded trainer with adapters computes the reference by leaving the adapters out. verl
    # keeps the reference in the memory of the CPU.
    if setup.needs_reference and not setup.is_verl and not setup.lora_rank:
        count = shape.num_parameters
        parts.append(MemoryPart("reference", 4 * count, f"4 bytes x {count:,} parameters"))
    return parts


def _gathered_parts(shape: ModelShape, setup: TrainingSetup) -> list[MemoryPart]:
    """Return the buffers in which verl's workers gather weights from all GPUs."""
    unit = shape.layer_parameters
    kind = "a layer"
    if not shape.is_tied and shape.embedding_parameters > unit:
        unit, kind = shape.embedding_parameters, "the LM head"
    num_bytes = GATHERED_BYTES * unit
    formula = f"{GATHERED_BYTES} bytes x {unit:,} parameters of {kind}"
    if shape.is_tied:  # FSDP2 then keeps the embedding gathered during the whole pass
        num_bytes += 2 * shape.embedding_parameters
        formula += f" + 2 bytes x {shape.embedding_parameters:,} of the embedding"
    largest = shape.largest_tensor
    gpus, divisor = ("", 1) if setup.is_gathered else (f" / {setup.num_gpus} GPUs", setup.num_gpus)
    return [
        MemoryPart("gathered layers", num_bytes, formula, "passes"),
        MemoryPart(
            "exported weight",
            -(-FLOAT32 * largest // divisor),
            f"4 bytes x {largest:,} parameters of the largest weight{gpus}, while weights are "
            "exported",
            "export",
        ),
    ]


def layer_bytes_per_token(shape: ModelShape, setup: TrainingSetup) -> int:
    """Return the bytes that one layer keeps of one token for the backward pass.

    The factors were counted with torch's hooks for saved tensors, and a test counts them again. The
    embedded trainer's residual stream is float32. verl's is bfloat16.
    """
    number = setup.compute_bytes
    per_hidden = 24 if number == FLOAT32 else 16 if setup.is_verl else 26
    per_head_value = 2 * number + (FLOAT32 + number if shape.family.has_qk_norm else 0)
    heads = shape.query_size + shape.kv_size
    return (
        per_hidden * shape.hidden_size
        + per_head_value * heads
        + 4 * number * shape.intermediate_size
    )


def _activations(shape: ModelShape, setup: TrainingSetup) -> MemoryPart:
    tokens, layers = setup.pass_tokens, shape.num_layers
    per_layer = layer_bytes_per_token(shape, setup)
    if not setup.is_recomputed:
        return MemoryPart(
            "activations",
            tokens * layers * per_layer,
            f"{tokens:,} tokens x {layers} layers x {per_layer:,} bytes",
            "passes",
        )
    residual = (setup.compute_bytes if setup.is_verl else FLOAT32) * shape.hidden_size
    return MemoryPart(
        "activations",
        tokens * (layers * residual + per_layer),
        f"{tokens:,} tokens x ({layers} layers x {residual:,} bytes of input + {per_layer:,} bytes "
        "of one layer)",
        "passes",
    )


def _logits(shape: ModelShape, setup: TrainingSetup) -> MemoryPart:
    tokens, vocabulary = setup.pass_tokens, shape.vocab_size
    if setup.is_verl:
        return MemoryPart(
            "logits",
            VERL_BYTES_PER_LOGIT * tokens * vocabulary,
            f"{VERL_BYTES_PER_LOGIT} bytes x {tokens:,} tokens x {vocabulary:,} in the vocabulary",
            "passes",
        )
    count = min(tokens * vocabulary, max(MAX_LOGITS, vocabulary))
    limit = "" if count < MAX_LOGITS else ", the most that are held at a time"
    return MemoryPart(
        "logits",
        EMBEDDED_BYTES_PER_LOGIT * count,
        f"{EMBEDDED_BYTES_PER_LOGIT} bytes x {count:,} logits{limit}",
        "passes",
    )
