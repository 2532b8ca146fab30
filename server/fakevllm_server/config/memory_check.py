"""Check that a model and a job fit into the memory of the GPUs that the section `cluster` names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fakevllm_adapters.job.model import TrainJob
from fakevllm_runtime.errors import ConfigError
from fakevllm_server.backends.vllm.command import MAX_ADAPTERS, parse_flags
from fakevllm_server.config.adapter_check import adapter_rank
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.placement.cluster_section import ClusterSection
from fakevllm_server.placement.memory_plan import Deployment, MemoryPlan, plan_memory
from fakevllm_server.placement.model_shape import ModelShape, read_model_shape
from fakevllm_server.placement.rollout_memory import RolloutSetup
from fakevllm_server.placement.training_memory import BFLOAT16, FLOAT32, TrainingSetup

NOT_CALCULATED = {
    "--engine-arg": ("quantization", "kv-cache-dtype", "kv-cache-memory-bytes", "cpu-offload-gb"),
    "--trainer-arg": ("cpu-offload",),
}
"""Arguments of vLLM and of the verl trainer that change the memory in a way that is not
calculated."""
RECOMPUTES, KEEPS_ACTIVATIONS = "--gradient-checkpointing", "--no-gradient-checkpointing"
"""Arguments that decide whether verl's workers recompute activations. They do by default."""


def check_memory(config: ServerConfig, job: TrainJob, model: str | None) -> None:
    """Raise ConfigError with one line if a job does not fit into the memory of the GPUs. Nothing is
    checked if the section names no memory, or if the model is not known yet."""
    cluster = config.cluster
    if cluster is None or cluster.gpu_memory_gib is None or model is None:
        return
    if not Path(model).is_dir():
        raise ConfigError(
            f"The memory for {model} cannot be calculated, because it is not a local folder: "
            "remove cluster.gpu_memory_gib."
        )
    shape = read_model_shape(Path(model))
    problems = memory_plan(config, job, shape).problems
    if not problems and cluster.min_training_gpus is not None:
        fewer = replace(cluster, training_gpus=cluster.min_training_gpus)
        problems = [
            f"With cluster.min_training_gpus = {cluster.min_training_gpus}: {problem}"
            for problem in memory_plan(replace(config, cluster=fewer), job, shape).problems
        ]
    if problems:
        raise ConfigError(f"{problems[0]} `fakevllm-server plan` shows the calculation.")


def memory_plan(config: ServerConfig, job: TrainJob, shape: ModelShape) -> MemoryPlan:
    """Return what each GPU holds for a job. Raises ConfigError if the section `cluster` or its
    memory is missing, or if vLLM cannot hold the job's adapters."""
    cluster = config.cluster
    memory = None if cluster is None else cluster.gpu_memory_bytes
    if cluster is None or memory is None:
        raise ConfigError(
            "The plan needs a section cluster (in a TOML file [server.cluster]) with "
            "gpus_per_node, training_gpus and gpu_memory_gib: add it."
        )
    has_vllm = config.rollout_name == "vllm"
    rank = adapter_rank(config, job)
    engine_flags = parse_flags(config.engine_args)
    _refuse_uncalculated("--engine-arg", engine_flags)
    rollout = RolloutSetup(
        memory,
        _number(engine_flags, "max-model-len", job.max_model_len) or shape.max_positions,
        tensor_parallel=cluster.tensor_parallel,
        number_bytes=_number_bytes(config.engine_args),
        max_num_seqs=_number(engine_flags, "max-num-seqs", job.max_num_seqs),
        max_batched_tokens=_number(engine_flags, "max-num-batched-tokens", None),
        adapter_rank=rank,
        num_adapters=MAX_ADAPTERS if rank else 0,
        **_utilization(engine_flags, job),
    )
    return plan_memory(
        Deployment(shape, cluster, rollout, _training_setup(config, cluster, job), has_vllm)
    )


def _training_setup(config: ServerConfig, cluster: ClusterSection, job: TrainJob) -> TrainingSetup:
    is_verl = config.trainer_name == "verl"
    flags = parse_flags(config.trainer_args)
    if is_verl:
        _refuse_uncalculated("--trainer-arg", flags)
    is_one_process = config.rollout_name == config.trainer_name
    arguments = config.engine_args if is_one_process else config.trainer_args
    own_tokens = _number(flags, "micro-batch-tokens", None) if is_verl else None
    return TrainingSetup(
        is_verl,
        cluster.training_gpus,
        own_tokens or job.micro_batch_tokens,
        compute_bytes=BFLOAT16 if is_verl else _number_bytes(arguments),
        is_recomputed=recomputes(config) if is_verl else job.gradient_checkpointing,
        lora_rank=job.lora_rank,
        target_modules=job.target_modules,
        needs_reference=job.needs_reference,
        is_gathered=cluster.nodes > 1,
    )


def recomputes(config: ServerConfig) -> bool:
    """Return True if verl's workers recompute activations. The last argument decides, and it
    overrides the job."""
    flags = [argument.replace("_", "-") for argument in config.trainer_args]
    chosen = [flag for flag in flags if flag in (RECOMPUTES, KEEPS_ACTIVATIONS)]
    return chosen[-1:] != [KEEPS_ACTIVATIONS]


def _refuse_uncalculated(argument: str, flags: Mapping[str, str | None]) -> None:
    for flag in NOT_CALCULATED[argument]:
        if flag in flags:
            raise ConfigError(
                f"{argument}=--{flag} changes the memory in a way that is not calculated: remove "
                "cluster.gpu_memory_gib."
            )


def _number_bytes(arguments: Sequence[str]) -> int:
    """Return the bytes of a number in the dtype that an engine with these arguments uses."""
    dtype = parse_flags(arguments).get("dtype")
    return FLOAT32 if dtype in ("float32", "float") else BFLOAT16


def _number(flags: Mapping[str, str | None], flag: str, default: int | None) -> int | None:
    """Return the value of a flag, or the job's setting `default` if the flag is missing."""
    if flag not in flags:
        return default
    text = flags[flag] or ""
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(
            f"--{flag}={text} cannot be used in the calculation of the memory: write a number of "
            "1 or more."
        )
    return int(text)


def _utilization(flags: Mapping[str, str | None], job: TrainJob) -> dict[str, float]:
    """Return vLLM's share of the memory, as an argument of RolloutSetup. Return {} if neither the
    server nor the job sets it, so that vLLM's default counts."""
    text = flags.get("gpu-memory-utilization")
    if text is None:
        value = job.gpu_memory_utilization
        return {} if value is None else {"utilization": value}
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization={text} must be above 0 and at most 1: correct it."
        )
    return {"utilization": share}
