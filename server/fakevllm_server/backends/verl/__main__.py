"""`python -m fakevllm_server.backends.verl`: the trainer's process, started by the server."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
from pathlib import Path

from fakevllm_server.backends.process.process import BOOT_TIMEOUT_S, REFUSED_EXIT_CODE
from fakevllm_server.backends.verl.installed import HOW_TO_INSTALL, check_installed
from fakevllm_server.types.backend import BackendError

END_WITHIN_S = 8.0
"""Ray may wait for workers in the middle of a step, and nobody waits for them any more."""


def main() -> None:
    options = _parser().parse_args()
    faulthandler.enable()
    # The server that started this may be gone before it could notice.
    faulthandler.dump_traceback_later(BOOT_TIMEOUT_S, exit=True)
    try:
        check_installed()
        _serve(options)
    # The user's mistake: one line, no traceback.
    except BackendError as error:
        _refuse(str(error))
    except ImportError as error:
        _refuse(f"the verl trainer cannot load what it needs ({error}): {HOW_TO_INSTALL}")


def _serve(options: argparse.Namespace) -> None:
    # Before verl is imported, which looks at these once.
    import torch

    # A cluster that is joined has accelerators, though none may be here, or says that it has none.
    may_be_cpu = options.ray_address is None or os.environ.get("VERL_PLATFORM") == "cpu"
    is_cpu = may_be_cpu and not torch.cuda.is_available()
    workers_env = workers_environment(is_cpu=is_cpu)
    os.environ.update(workers_env)
    # Heavy, and not needed to print --help.
    from fakevllm_server.backends.embedded.device_and_dtype import resolve_dtype
    from fakevllm_server.backends.embedded.model_folder import read_config, resolve_model_folder
    from fakevllm_server.backends.http.engine_server import serve
    from fakevllm_server.backends.verl.cluster import Cluster
    from fakevllm_server.backends.verl.engine import VerlTrainer
    from fakevllm_server.backends.verl.group import Workers
    from fakevllm_server.backends.verl.places import spread
    from fakevllm_server.backends.verl.settings import worker_config

    model = resolve_model_folder(options.model, options.allow_hub).resolve()
    read_config(model)  # what is wrong with a folder is told in one line
    dtype = resolve_dtype("auto", torch.device("cpu" if is_cpu else "cuda"))
    num_fake_gpus = (options.num_workers or 1) if is_cpu else 0
    cluster = Cluster(options.ray_address, num_fake_gpus, workers_env)
    try:
        places = spread(cluster.num_gpus_per_node(), options.num_workers)
        config = worker_config(model, is_cpu=is_cpu, seed=options.seed)
        workers = Workers(config, places, on_loopback=cluster.is_private)
        if options.keep_reference:  # before anything is restored
            workers.keep_reference()
        trainer = VerlTrainer(
            cluster,
            workers,
            model,
            dtype,
            options.micro_batch_tokens,
            has_reference=options.keep_reference,
        )
        faulthandler.cancel_dump_traceback_later()
        serve(None, trainer, options.socket, on_close=_end_soon)
    finally:
        cluster.close()


def _end_soon() -> None:
    faulthandler.dump_traceback_later(END_WITHIN_S, exit=True)


def workers_environment(*, is_cpu: bool) -> dict[str, str]:
    """What this process and every worker of it must see."""
    env = {"RAY_USAGE_STATS_ENABLED": "0"}
    if "HF_HUB_OFFLINE" in os.environ:
        env["HF_HUB_OFFLINE"] = os.environ["HF_HUB_OFFLINE"]
    if is_cpu:
        env |= {
            "VERL_USE_EXTERNAL_MODULES": "fakevllm_server.backends.verl.cpu_platform",
            "VERL_PLATFORM": "cpu",
            # verl registers its FSDP engine for accelerators only.
            "VERL_ENGINE_DEVICE": "cuda",
            # GPUs are declared here that are none, and Ray would hide the missing ones.
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
    return env


def _refuse(reason: str) -> None:
    print(reason.replace("\n", " "), file=sys.stderr)
    sys.exit(REFUSED_EXIT_CODE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fakevllm_server.backends.verl", description=__doc__
    )
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to answer on")
    parser.add_argument("--model", required=True, help="model folder in Hugging Face form")
    parser.add_argument("--allow-hub", action="store_true", help="--model may be a hub name")
    parser.add_argument("--served-model-name", help="of the rollout engine; not used here")
    parser.add_argument("--run-dir", type=Path, required=True, help="the server's run directory")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--train-only", action="store_true", help="said by the server; always so")
    parser.add_argument(
        "--ray-address",
        default=os.environ.get("RAY_ADDRESS") or None,
        help="a Ray cluster to join; RAY_ADDRESS where not given, a private one where neither is",
    )
    parser.add_argument(
        "--keep-reference",
        action="store_true",
        help="said by the server, of jobs that need it: hold a copy of the first weights",
    )
    parser.add_argument("--num-workers", type=int, help="one per GPU; all of them where not given")
    parser.add_argument(
        "--micro-batch-tokens", type=int, help="most tokens of a forward pass; wins over the job's"
    )
    return parser


if __name__ == "__main__":
    main()
