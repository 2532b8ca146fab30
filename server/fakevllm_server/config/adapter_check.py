"""Check that the job's LoRA adapters and the vLLM that the server starts agree."""

from __future__ import annotations

from fakevllm_adapters.job.model import TrainJob
from fakevllm_runtime.errors import ConfigError
from fakevllm_server.backends.vllm.command import max_lora_rank
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.types.backend import BackendRefused
from fakevllm_server.types.engine_spec import EngineSpec


def adapter_rank(config: ServerConfig, job: TrainJob) -> int:
    """Return the rank of the adapters that vLLM holds; 0 without vLLM, and if vLLM gets whole
    weights. Raises ConfigError if vLLM would hold adapters while the job trains all weights, or if
    the rank of the job's adapters is too high for vLLM."""
    if config.rollout_name != "vllm":
        return 0
    spec = EngineSpec(
        "vllm",
        config.run_dir,
        None,
        "plan",
        extra_args=config.engine_args,
        lora_rank=job.lora_rank,
    )
    try:
        return max_lora_rank(spec) or 0
    except BackendRefused as refused:
        raise ConfigError(f"{refused}.") from None
