"""Decide with which settings the engines of a job are started."""

from __future__ import annotations

import os
from dataclasses import replace

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.config.start_check import check_job
from fakevllm_server.types.engine_spec import EngineSpec
from fakevllm_server.types.weight_versions import WHOLE_CALLS_BOUND_S


def engine_specs(config: ServerConfig, job: TrainJob) -> tuple[list[EngineSpec], EngineSpec]:
    """Return the settings with which each rollout replica is started, and the settings for the
    trainer. The server's own flags override the job's settings.

    Raise ConfigError if this server cannot run the job.
    """
    model = check_job(config, job)
    name = config.served_name_of(config.model_for(job))
    cluster = config.cluster
    rollout = EngineSpec(
        config.rollout_name,
        config.run_dir,
        model,
        name,
        seed=config.seed,
        allow_hub=config.allow_hub,
        extra_args=config.engine_args_for(job),
        job_args=config.engine_settings_for(job),
        lora_rank=job.lora_rank if config.trainer_name != "fake" else 0,
        target_modules=job.target_modules,
        url=config.rollout_url,
        api_key=config.rollout_key,
        visible_gpus=cluster and cluster.visible_gpus(cluster.replica_range(0), os.environ),
        media_domains=config.media_domains,
        drain_bound_s=WHOLE_CALLS_BOUND_S if job.async_steps else None,
        weight_transport=config.weight_transport,
        shares_gpu=cluster is None or cluster.shares_gpu,
        sleeps=cluster is not None and cluster.colocate == "sleep",
    )
    trainer = replace(
        rollout,
        engine=config.trainer_name,
        extra_args=config.trainer_args_for(job),
        visible_gpus=cluster and cluster.visible_training_gpus(os.environ),
        train_only=True,
    )
    return [_replica(config, rollout, number) for number in range(config.num_replicas)], trainer


def _replica(config: ServerConfig, rollout: EngineSpec, number: int) -> EngineSpec:
    """Return the settings of a rollout replica. `rollout` has the settings of the only one. As
    one of several, each replica has its own folder for its log and its sockets, and its own
    seed, so that equal prompts get different answers on different replicas."""
    if config.num_replicas == 1:
        return rollout
    run_dir = config.run_dir / f"replica-{number}"
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    cluster, urls = config.cluster, config.rollout_urls
    return replace(
        rollout,
        run_dir=run_dir,
        seed=config.seed + number,
        url=urls[number] if urls else None,
        visible_gpus=cluster and cluster.visible_gpus(cluster.replica_range(number), os.environ),
    )
