"""What each GPU holds, whether it fits, and what to change if it does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fakevllm_server.placement.cluster_section import ClusterSection
from fakevllm_server.placement.memory_parts import MemoryPart, Phase, gib, largest_phase, peak_bytes
from fakevllm_server.placement.model_shape import ModelShape
from fakevllm_server.placement.rollout_memory import (
    RolloutSetup,
    embedded_sampler_parts,
    kv_bytes_per_token,
    vllm_parts,
)
from fakevllm_server.placement.training_memory import TrainingSetup, training_parts

KV_CACHE, CUDA = "KV cache", "CUDA"
SAMPLES, TRAINS, BOTH = "samples with vLLM", "trains", "samples with vLLM, and trains"
MAX_TENSOR_PARALLEL, MAX_TRAINING_GPUS = 16, 1024
"""Largest numbers of GPUs that a remedy names."""
MIN_PASS_TOKENS = 512
"""Smallest `micro_batch_tokens` that a remedy names."""
NO_REMEDY = "use GPUs with more memory, or a smaller model"
COUNTS = ("tensor_parallel", "data_parallel", "replicas", "training_gpus")
"""Keys of the section that say how many GPUs do something."""
MAX_CALL_TOKENS = 2**22
"""Longest call for which the plan says whether it fits into a training pass."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model, the engines that sample and train it, and the GPUs of both."""

    shape: ModelShape
    cluster: ClusterSection
    rollout: RolloutSetup
    training: TrainingSetup
    has_vllm: bool = True
    """Whether vLLM samples. Otherwise, the embedded engine samples and trains in one process."""

    @property
    def cache_bytes(self) -> int:
        """Bytes of vLLM's KV cache on one GPU."""
        parts = vllm_parts(self.shape, self.rollout)
        return next(part.num_bytes for part in parts if part.name == KV_CACHE)

    @property
    def lacks_cache(self) -> bool:
        """Whether vLLM's KV cache is too small for a request of the maximum length."""
        wanted = self.rollout.max_model_len * kv_bytes_per_token(self.shape, self.rollout)
        return self.has_vllm and self.cache_bytes < wanted


@dataclass(frozen=True, slots=True)
class GpuRole:
    """GPUs that all hold the same."""

    name: str
    gpus: range
    parts: Sequence[MemoryPart]

    @property
    def peak_bytes(self) -> int:
        return peak_bytes(self.parts)

    @property
    def peak_phase(self) -> Phase:
        return largest_phase(self.parts)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What each GPU holds, and what does not fit."""

    deployment: Deployment
    roles: Sequence[GpuRole]
    problems: Sequence[str]
    """One line for each thing that does not fit, with the remedy."""
    notes: Sequence[str]
    """One line for each thing that fits only under a condition."""

    @property
    def fits(self) -> bool:
        return not self.problems


def gpu_roles(deployment: Deployment) -> list[GpuRole]:
    """Return the groups of GPUs that hold the same, in the order of their numbers."""
    cluster = deployment.cluster
    trainer = training_parts(deployment.shape, deployment.training)
    if not deployment.has_vllm:
        shares = deployment.training.lora_rank > 0 and deployment.training.compute_bytes == 2
        sampler = embedded_sampler_parts(
            deployment.shape, deployment.rollout, shares_weights=shares
        )
        return [GpuRole("samples and trains", range(1), [*sampler, *trainer])]
    vllm = vllm_parts(deployment.shape, deployment.rollout)
    if not cluster.is_colocated:
        return [
            GpuRole(SAMPLES, cluster.rollout_range, vllm),
            GpuRole(TRAINS, cluster.training_range, trainer),
        ]
    if cluster.colocate == "sleep":
        vllm = [part if part.name == CUDA else replace(part, phase="sampling") for part in vllm]
    vllm = [replace(part, name=f"vLLM: {part.name}") for part in vllm]
    num_sampling, num_training = len(cluster.rollout_range), len(cluster.training_range)
    num_both = min(num_sampling, num_training)
    roles = [GpuRole(BOTH, range(num_both), [*vllm, *trainer])]
    if num_sampling > num_both:
        roles.append(GpuRole(SAMPLES, range(num_both, num_sampling), vllm))
    if num_training > num_both:
        roles.append(GpuRole(TRAINS, range(num_both, num_training), trainer))
    return roles


def is_enough_memory(deployment: Deployment) -> bool:
    """Return True if everything fits into the memory of the GPUs."""
    return not deployment.lacks_cache and not any(
        role.peak_bytes > deployment.rollout.gpu_bytes for role in gpu_roles(deployment)
    )


def plan_memory(deployment: Deployment) -> MemoryPlan:
    """Return what each GPU of a deployment holds."""
    problems = [*_problems(deployment)]
    notes = [] if problems else [*_notes(deployment)]
    return MemoryPlan(deployment, gpu_roles(deployment), problems, notes)


def _problems(deployment: Deployment) -> Iterator[str]:
    shape, rollout = deployment.shape, deployment.rollout
    if deployment.has_vllm and shape.num_heads % rollout.tensor_parallel:
        yield (
            f"cluster.tensor_parallel is {rollout.tensor_parallel}, and the model has "
            f"{shape.num_heads} attention heads: choose a number that divides them."
        )
    elif deployment.lacks_cache:
        cache, tokens = deployment.cache_bytes, rollout.max_model_len
        yield (
            f"vLLM's share of a GPU ({rollout.utilization:g} x {gib(rollout.gpu_bytes)}) leaves "
            f"{gib(cache)} for the KV cache, and one request of {tokens:,} tokens needs "
            f"{gib(tokens * kv_bytes_per_token(shape, rollout))}: {rollout_remedies(deployment)}."
        )
    for role in gpu_roles(deployment):
        if role.name != SAMPLES and role.peak_bytes > rollout.gpu_bytes:
            yield (
                f"A GPU that {role.name} needs {gib(role.peak_bytes)}, and has "
                f"{gib(rollout.gpu_bytes)}: {training_remedies(deployment)}."
            )
            return


def _notes(deployment: Deployment) -> Iterator[str]:
    """Yield a line if the longest call fits into vLLM, but not into a training pass. A call is
    never divided."""
    longest = deployment.rollout.max_model_len
    fitting = longest_training_call(deployment)
    if fitting < longest:
        yield (
            f"Calls of up to {longest:,} tokens are sampled, and calls above {fitting:,} tokens do "
            "not fit into a training pass: lower --max-model-len, or train on more memory."
        )


def longest_training_call(deployment: Deployment) -> int:
    """Return the number of tokens of the longest call that fits into a training pass."""
    low, high = 0, MAX_CALL_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        training = replace(deployment.training, pass_tokens=middle)
        fits = is_enough_memory(replace(deployment, training=training))
        low, high = (middle, high) if fits else (low, middle)
    return low


def rollout_remedies(deployment: Deployment) -> str:
    """Return changes with which vLLM holds a request of the maximum length."""
    rollout = deployment.rollout
    heads = deployment.shape.num_heads
    wider = [
        (
            f"set tensor_parallel = {count}{_needed_gpus(deployment, tensor_parallel=count)}",
            replace(rollout, tensor_parallel=count),
        )
        for count in range(rollout.tensor_parallel + 1, MAX_TENSOR_PARALLEL + 1)
        if heads % count == 0
    ]
    shares = [percent / 100 for percent in range(int(rollout.utilization * 100) + 1, 96)]
    larger = [
        (f"raise --gpu-memory-utilization to {share:g}", replace(rollout, utilization=share))
        for share in shares
    ]
    num_tokens = deployment.cache_bytes // kv_bytes_per_token(deployment.shape, rollout)
    shorter = [
        (f"lower --max-model-len to {num_tokens}", replace(rollout, max_model_len=num_tokens))
    ]
    return _alternatives(
        [(text, replace(deployment, rollout=changed)) for text, changed in changes]
        for changes in (wider, larger, shorter if num_tokens else [])
    )


def training_remedies(deployment: Deployment) -> str:
    """Return changes with which the trainer fits."""
    training, rollout = deployment.training, deployment.rollout
    halves = [training.pass_tokens >> shift for shift in range(1, 16)]
    changes: list[list[tuple[str, TrainingSetup]]] = [
        [
            (f"lower micro_batch_tokens to {count}", replace(training, pass_tokens=count))
            for count in halves
            if count >= MIN_PASS_TOKENS
        ]
    ]
    if training.is_verl:
        changes.append(
            [
                (
                    f"set training_gpus = {count}{_needed_gpus(deployment, training_gpus=count)}",
                    replace(training, num_gpus=count),
                )
                for count in range(training.num_gpus + 1, MAX_TRAINING_GPUS + 1)
            ]
        )
    recomputed = replace(training, is_recomputed=True)
    if not training.is_recomputed:
        remedy = "remove --no-gradient-checkpointing"
        if not training.is_verl:
            remedy = "set gradient_checkpointing = true in the job"
        changes.append([(remedy, recomputed)])
    if not training.lora_rank:
        adapters = replace(recomputed, lora_rank=16)
        changes.append([("train adapters (lora_rank = 16) with gradient_checkpointing", adapters)])
    deployments = [
        [(text, replace(deployment, training=changed)) for text, changed in one] for one in changes
    ]
    if deployment.has_vllm and deployment.cluster.colocate == "shared":
        shares = [percent / 100 for percent in range(int(rollout.utilization * 100), 4, -1)]
        deployments.insert(
            0,
            [
                (
                    f"lower --gpu-memory-utilization to {share:g}",
                    replace(deployment, rollout=replace(rollout, utilization=share)),
                )
                for share in shares
            ],
        )
    return _alternatives(deployments)


def _needed_gpus(deployment: Deployment, **numbers: int) -> str:
    """Return the number of GPUs that other numbers in the section need, as text. Return an empty
    text if the GPUs of the section are enough."""
    cluster = deployment.cluster
    counts = {name: getattr(cluster, name) for name in COUNTS} | numbers
    sampling = counts["tensor_parallel"] * counts["data_parallel"] * counts["replicas"]
    training = counts["training_gpus"]
    needed = max(sampling, training) if cluster.is_colocated else sampling + training
    return f" (needs {needed} GPUs)" if needed > cluster.num_gpus else ""


def _alternatives(kinds: Iterable[Sequence[tuple[str, Deployment]]]) -> str:
    """Return the first change of each kind with which everything fits, joined by "or"."""
    texts = [
        next((text for text, changed in changes if is_enough_memory(changed)), None)
        for changes in kinds
    ]
    return " or ".join(text for text in texts if text is not None) or NO_REMEDY
