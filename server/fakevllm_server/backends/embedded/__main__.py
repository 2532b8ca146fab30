"""The entry point of the embedded engine's process. The server starts it as `python -m
fakevllm_server.backends.embedded`."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fakevllm_runtime.engines import install_hint
from fakevllm_server.backends.process.child_process import REFUSED_EXIT_CODE

if TYPE_CHECKING:
    from fakevllm_server.backends.embedded.engine import EmbeddedEngine
    from fakevllm_server.backends.embedded.train.standalone_trainer import StandaloneTrainer


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if options.train_only and (options.max_num_seqs or options.max_model_len):
        parser.error("--max-num-seqs and --max-model-len are for sampling: not with --train-only")
    if options.train_only and (
        options.torch_threads is None or options.prefix_cache_mib is not None
    ):
        parser.error(
            "--torch-threads auto and --prefix-cache-mib are for sampling: not with --train-only"
        )
    if options.lockstep and options.max_num_seqs not in (None, 1):
        parser.error("a job in lockstep decodes one answer at a time: not with --max-num-seqs")
    # These imports are slow, and not needed to print --help.
    from fakevllm_server.backends.http.engine_server import serve
    from fakevllm_server.types.backend import BackendError

    # Without it, a crash inside torch leaves no Python traceback.
    faulthandler.enable()
    try:
        if options.train_only:
            trainer = _trainer(options)
            serve(None, trainer, options.socket, on_close=trainer.close)
        else:
            engine = _engine(options)
            serve(engine, engine, options.socket, policies=engine, on_close=engine.close)
    # A configuration mistake is printed as one line, without a traceback.
    except BackendError as error:
        _refuse(str(error))
    except ImportError as error:
        _refuse(
            f"The embedded engine cannot import a package ({error}): {install_hint('embedded')}"
        )


def _refuse(message: str) -> NoReturn:
    """Print the message to the log, and exit with REFUSED_EXIT_CODE. This exit code tells the
    server not to start the process again, because the user must correct a setting."""
    print(message, file=sys.stderr)
    sys.exit(REFUSED_EXIT_CODE)


def _engine(options: argparse.Namespace) -> EmbeddedEngine:
    from fakevllm_server.backends.embedded.engine import EmbeddedEngine, EngineConfig
    from fakevllm_server.backends.embedded.model_folder import resolve_model_folder

    config = EngineConfig(
        model=resolve_model_folder(options.model, options.allow_hub),
        served_model_name=options.served_model_name,
        seed=options.seed,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs or 64,
        lockstep=options.lockstep,
        device=options.device,
        dtype=options.dtype,
        torch_threads=options.torch_threads,
        prefix_cache_mib=options.prefix_cache_mib,
    )
    return EmbeddedEngine(config)


def _trainer(options: argparse.Namespace) -> StandaloneTrainer:
    from fakevllm_server.backends.embedded.model_folder import resolve_model_folder
    from fakevllm_server.backends.embedded.train.standalone_trainer import StandaloneTrainer

    return StandaloneTrainer(
        resolve_model_folder(options.model, options.allow_hub),
        seed=options.seed,
        device=options.device,
        dtype=options.dtype,
        torch_threads=options.torch_threads,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fakevllm_server.backends.embedded", description=__doc__
    )
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to serve on")
    parser.add_argument("--model", required=True, help="model folder in Hugging Face format")
    parser.add_argument("--allow-hub", action="store_true", help="--model may be a hub name")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--run-dir", type=Path, required=True, help="the server's run directory")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=None, help="default: 64")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument(
        "--torch-threads", type=_num_threads, default=1, help="a number, or auto to measure it once"
    )
    parser.add_argument(
        "--prefix-cache-mib", type=int, default=None, help="size of the prefix cache; 0: none"
    )
    parser.add_argument("--lockstep", action="store_true", help="one answer at a time, on a CPU")
    parser.add_argument(
        "--train-only", action="store_true", help="train without a sampler and KV cache"
    )
    return parser


def _num_threads(text: str) -> int | None:
    """Parse the value of the flag for torch's threads: a number, or `auto`, which gives None."""
    return None if text == "auto" else int(text)


if __name__ == "__main__":
    main()
