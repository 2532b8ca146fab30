"""Check, before a server or an engine starts, that the settings, the machine and the job agree."""

from __future__ import annotations

from collections.abc import Mapping

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_adapters.job.model import TrainJob
from fakevllm_runtime.errors import ConfigError
from fakevllm_server.config.adapter_check import adapter_rank
from fakevllm_server.config.memory_check import check_memory, recomputes
from fakevllm_server.config.model import ServerConfig, find_model
from fakevllm_server.config.replicas_check import check_gpus
from fakevllm_server.config.weight_transport_check import check_ray_address


def check_start(config: ServerConfig, job: TrainJob | None, environ: Mapping[str, str]) -> None:
    """Raise ConfigError in these cases:

    * The GPUs do not allow the replicas or the section `cluster`.
    * A Ray cluster in the environment contradicts the weight transport.
    * The server cannot run the job.

    `job` is the job in the configuration file. If it is None, jobs come later, and each of them is
    checked before its engine starts. `environ` are the environment variables of the server."""
    check_gpus(config, environ)
    check_ray_address(config, environ)
    if config.cluster is not None:
        config.cluster.check_startable(environ)
        if config.cluster.nodes > 1 and config.weights_dir is None:
            raise ConfigError(
                f"cluster.nodes is {config.cluster.nodes}, and new weights pass through a folder "
                "in the memory of one machine: set --weights-dir to a folder that all machines "
                "share."
            )
    if job is not None:
        check_job(config, job)


def check_job(config: ServerConfig, job: TrainJob) -> str | None:
    """Return the folder or name of the model that the engines load for a job; None for the fake
    engine without a model. Raises ConfigError if this server cannot run the job: a setting of the
    job contradicts a flag or the section `cluster`, the model is missing, or the job does not fit
    into the memory of the GPUs."""
    _check_lockstep(config, job)
    _check_async_steps(config, job)
    _check_trainer(config, job)
    setting = config.model_for(job)
    if setting is None and config.trainer_name != "fake":
        raise ConfigError(
            "No model is set: start the server with --model DIR (`model` in a file), or name a "
            "model in the job."
        )
    model = None if setting is None else find_model(setting, config.allow_hub)
    adapter_rank(config, job)
    check_memory(config, job, model)
    return model


def _check_lockstep(config: ServerConfig, job: TrainJob) -> None:
    """Raise ConfigError if two runs of a job in lockstep could differ on this server. Only a single
    embedded engine can decode each answer alone."""
    if not job.lockstep:
        return
    if {config.rollout_name, config.trainer_name} != {"embedded"}:
        raise ConfigError(
            "job.lockstep needs the embedded engine, which can decode each answer alone: start "
            "the server with --backend embedded, or remove job.lockstep."
        )
    if config.num_replicas > 1:
        raise ConfigError(
            f"job.lockstep needs one engine, and this server has {config.num_replicas} replicas: "
            "remove --replicas (or cluster.replicas), or remove job.lockstep."
        )


def _check_async_steps(config: ServerConfig, job: TrainJob) -> None:
    cluster = config.cluster
    if cluster is not None and cluster.colocate == "sleep" and job.async_steps:
        raise ConfigError(
            "job.async_steps lets episodes run beside steps, and with cluster.colocate = "
            '"sleep" vLLM sleeps during each step: remove async_steps, or use another division.'
        )


def _check_trainer(config: ServerConfig, job: TrainJob) -> None:
    """Raise ConfigError if the trainer of this server cannot train a job as it says."""
    demonstration_loss = LossSpec.of(job).of_demonstrations
    if config.trainer_name == "fake" and demonstration_loss is not None:
        raise ConfigError(
            f"The fake engine has no loss {demonstration_loss}: use --trainer embedded, or remove "
            "the loss from the job."
        )
    if config.trainer_name == "verl" and job.gradient_checkpointing and not recomputes(config):
        raise ConfigError(
            "job.gradient_checkpointing contradicts --trainer-arg=--no-gradient-checkpointing: "
            "remove one of them."
        )
