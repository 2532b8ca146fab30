"""The entry point of the verl trainer's process. The server starts it as `python -m
fakevllm_server.backends.verl`."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from pathlib import Path

from fakevllm_runtime.engines import BOOT_TIMEOUT_S
from fakevllm_server.backends.process.child_process import REFUSED_EXIT_CODE
from fakevllm_server.backends.training.lora_settings import LoraSettings
from fakevllm_server.backends.verl.install_check import HOW_TO_INSTALL, check_installed
from fakevllm_server.backends.verl.trainer_arguments import COLLECTIVE_TIMEOUT_S
from fakevllm_server.types.backend import BackendError, BackendRefused

CLOSE_TIMEOUT_S = 8.0
"""Maximum seconds that this process takes to shut down. Without the limit, Ray may wait for workers
that are in the middle of a step."""


def main() -> None:
    options = _parser().parse_args()
    faulthandler.enable()
    # The server may have died before this process can notice it.
    faulthandler.dump_traceback_later(BOOT_TIMEOUT_S, exit=True)
    try:
        check_installed()
        _serve(options)
    # A mistake of the user is printed on one line, without a traceback.
    except BackendError as error:
        _refuse(str(error))
    except ImportError as error:
        _refuse(f"the verl trainer cannot import a package ({error}): {HOW_TO_INSTALL}")


def _serve(options: argparse.Namespace) -> None:
    # verl reads the environment when it is imported, so set the environment first.
    import torch

    # An existing cluster is assumed to have accelerators, even if this machine has none, unless
    # VERL_PLATFORM says otherwise.
    may_be_cpu = options.ray_address is None or os.environ.get("VERL_PLATFORM") == "cpu"
    is_cpu = may_be_cpu and not torch.cuda.is_available()
    workers_env = workers_environment(is_cpu=is_cpu, is_private=options.ray_address is None)
    os.environ.update(workers_env)
    # These imports are slow, and --help does not need them.
    from fakevllm_server.backends.embedded.device_and_dtype import resolve_dtype
    from fakevllm_server.backends.embedded.model_folder import read_config, resolve_model_folder
    from fakevllm_server.backends.http.engine_server import serve
    from fakevllm_server.backends.verl.adapter_check import check_adapters
    from fakevllm_server.backends.verl.cluster import Cluster
    from fakevllm_server.backends.verl.trainer import VerlTrainer
    from fakevllm_server.backends.verl.worker_config import worker_config
    from fakevllm_server.backends.verl.worker_group import WorkerGroup

    model = resolve_model_folder(options.model, options.allow_hub).resolve()
    model_config = read_config(model)  # reports a broken model folder on one line
    lora = _lora(options)
    if lora is not None:
        check_adapters(model_config, lora)
    dtype = resolve_dtype("auto", torch.device("cpu" if is_cpu else "cuda"))
    num_fake_gpus = (options.min_workers or options.num_workers or 1) if is_cpu else 0
    cluster = Cluster(options.ray_address, num_fake_gpus, workers_env)
    try:
        num_gpus = cluster.num_gpus_per_node()
        if options.max_local_gpus is not None:
            _check_local_gpus(cluster.num_local_gpus(), options.max_local_gpus)
        workers_per_node = place_or_name_lost_nodes(num_gpus, cluster.lost_nodes, options)
        config = worker_config(
            model,
            is_cpu=is_cpu,
            seed=options.seed,
            lora=lora,
            gradient_checkpointing=options.gradient_checkpointing,
            cpu_offload=options.cpu_offload,
        )
        workers = WorkerGroup(
            config,
            workers_per_node,
            on_loopback=cluster.is_private,
            lora=lora,
            lora_seed=options.lora_seed,
            collective_timeout_s=options.collective_timeout,
        )
        # The reference is the model before any checkpoint is restored. With LoRA, it is the model
        # without its adapters.
        if options.keep_reference and lora is None:
            workers.keep_reference()
        trainer = VerlTrainer(
            cluster,
            workers,
            model,
            dtype,
            options.micro_batch_tokens,
            has_reference=options.keep_reference or lora is not None,
            lora=lora,
            gradient_checkpointing=config.model_config.enable_gradient_checkpointing,
            start_note=start_note(workers_per_node, options.num_workers, cluster.lost_nodes),
        )
        faulthandler.cancel_dump_traceback_later()
        serve(None, trainer, options.socket, on_close=_limit_close_time)
    finally:
        cluster.close()


def _check_local_gpus(num_gpus: int, max_gpus: int) -> None:
    """Raise BackendRefused if Ray on this machine has more GPUs than may train here. A worker could
    otherwise be placed on a GPU of the rollout engine."""
    if num_gpus > max_gpus:
        raise BackendRefused(
            f"Ray has {num_gpus} GPUs on this machine, and the section cluster leaves {max_gpus} "
            "of them to train: start Ray here with CUDA_VISIBLE_DEVICES set to the GPUs that the "
            "rollout engine does not use"
        )


def place_or_name_lost_nodes(
    num_gpus: list[int], lost: list[str], options: argparse.Namespace
) -> list[int]:
    """Return the number of workers on each node. If there are too few GPUs, raise BackendRefused.
    The message names the lost nodes, whose addresses are `lost`, as a possible cause."""
    from fakevllm_server.backends.verl.worker_placement import place_workers

    try:
        return place_workers(num_gpus, options.num_workers, options.min_workers)
    except BackendRefused as refused:
        if not lost:
            raise
        raise BackendRefused(
            f"{refused}; the cause may be that {_lost_text(lost)}: start Ray there again, or lower "
            "cluster.min_training_gpus, which is training_gpus by default"
        ) from None


def _lost_text(nodes: list[str]) -> str:
    if len(nodes) == 1:
        return f"Ray node {nodes[0]} is dead or does not answer"
    return f"Ray nodes {', '.join(nodes)} are dead or do not answer"


def start_note(workers_per_node: list[int], num_workers: int | None, lost: list[str]) -> str | None:
    """Return a line about the workers for the server's log if there are fewer than usual. `lost`
    has the addresses of the lost nodes."""
    num_started = sum(workers_per_node)
    if num_workers is None or num_started == num_workers:
        return None
    cause = f" ({_lost_text(lost)})" if lost else ""
    return (
        f"trains with {num_started} of {num_workers} workers, because no more fit on the GPUs of "
        f"the Ray cluster{cause}; more are used when the trainer starts again"
    )


def _lora(options: argparse.Namespace) -> LoraSettings | None:
    if options.lora_rank == 0:
        return None
    return LoraSettings(options.lora_rank, options.lora_alpha, options.target_modules)


def _limit_close_time() -> None:
    faulthandler.dump_traceback_later(CLOSE_TIMEOUT_S, exit=True)


def workers_environment(*, is_cpu: bool, is_private: bool) -> dict[str, str]:
    """Return the environment variables to set in this process and in all workers. `is_cpu` is True
    if the workers train on CPUs, and `is_private` if all of them are on this machine."""
    # The vendor selects ForestEngine.
    env = {"RAY_USAGE_STATS_ENABLED": "0", "VERL_ENGINE_VENDOR": "fakevllm"}
    if "HF_HUB_OFFLINE" in os.environ:
        env["HF_HUB_OFFLINE"] = os.environ["HF_HUB_OFFLINE"]
    if is_cpu:
        env |= {
            "VERL_USE_EXTERNAL_MODULES": "fakevllm_server.backends.verl.cpu_platform",
            "VERL_PLATFORM": "cpu",
            # verl registers its FSDP engine for accelerators only.
            "VERL_ENGINE_DEVICE": "cuda",
            # The private cluster declares GPUs that do not exist. Keep Ray from hiding them.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "OMP_NUM_THREADS": "1",
        }
    if is_private:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def _refuse(reason: str) -> None:
    print(reason.replace("\n", " "), file=sys.stderr)
    sys.exit(REFUSED_EXIT_CODE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fakevllm_server.backends.verl", description=__doc__
    )
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen on")
    parser.add_argument("--model", required=True, help="model folder in Hugging Face format")
    parser.add_argument(
        "--allow-hub",
        action="store_true",
        help="allow the name of a model on the Hugging Face hub as --model",
    )
    parser.add_argument("--served-model-name", help="ignored; it is for the rollout engine")
    parser.add_argument("--run-dir", type=Path, required=True, help="the server's run directory")
    parser.add_argument("--seed", type=int, required=True, help="seed of the workers")
    parser.add_argument(
        "--train-only", action="store_true", help="ignored; this process always only trains"
    )
    parser.add_argument(
        "--ray-address",
        default=os.environ.get("RAY_ADDRESS") or None,
        help="Ray cluster to use; default: RAY_ADDRESS, or else a private cluster",
    )
    parser.add_argument(
        "--keep-reference",
        action="store_true",
        help="keep a copy of the first weights, for jobs with a KL; set by the server",
    )
    parser.add_argument(
        "--lora-rank",
        type=int,
        default=0,
        help="rank of the LoRA adapters to train; 0 trains all weights; set by the server",
    )
    parser.add_argument(
        "--lora-alpha", type=int, default=16, help="alpha of the adapters; set by the server"
    )
    parser.add_argument(
        "--target-modules",
        default="all-linear",
        help="layers with an adapter, as in the job; set by the server",
    )
    parser.add_argument(
        "--lora-seed",
        type=int,
        default=0,
        help="seed of the adapters' initial values; set by the server",
    )
    parser.add_argument(
        "--gradient-checkpointing",
        action=argparse.BooleanOptionalAction,
        help="compute activations again in the backward pass, to save memory; set by the server "
        "if the job sets it; default: on for accelerators",
    )
    parser.add_argument(
        "--cpu-offload",
        action="store_true",
        help="keep weights and optimizer state in the CPU's memory between steps",
    )
    parser.add_argument(
        "--num-workers", type=int, help="number of workers, one per GPU; default: all GPUs"
    )
    parser.add_argument(
        "--min-workers",
        type=int,
        help="start with fewer workers, but at least this number, if the Ray cluster has fewer "
        "GPUs than --num-workers; default: --num-workers",
    )
    parser.add_argument(
        "--max-local-gpus",
        type=int,
        help="refuse a Ray that has more GPUs than this number on this machine; set by the server",
    )
    parser.add_argument(
        "--collective-timeout",
        type=float,
        default=COLLECTIVE_TIMEOUT_S,
        metavar="SECONDS",
        help="maximum time that a worker waits for another worker; at least 660 while the "
        "workers send weights to vLLM; default: %(default)g",
    )
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        help="maximum tokens of a forward pass; overrides the job's setting",
    )
    return parser


if __name__ == "__main__":
    main()
