"""The LoRA settings of a job, with the texts that name these settings in messages and commands."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from fakevllm_adapters.job.model import TrainJob


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """The LoRA settings of a job. The settings are also stored in checkpoints."""

    rank: int
    alpha: int
    target_modules: str

    @staticmethod
    def of(job: TrainJob) -> LoraSettings | None:
        """Return the job's LoRA settings, or None if the job trains all weights."""
        if job.lora_rank == 0:
            return None
        return LoraSettings(job.lora_rank, job.lora_alpha, job.target_modules)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def describe_settings(lora: LoraSettings | None) -> str:
    """Return the LoRA settings as text for messages, in the notation of a job file."""
    if lora is None:
        return "lora_rank = 0"
    return (
        f"lora_rank = {lora.rank}, lora_alpha = {lora.alpha}, "
        f'target_modules = "{lora.target_modules}"'
    )
