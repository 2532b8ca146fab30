"""`python -m fakevllm_server.backends.embedded`: the engine's process, started by the server."""

from __future__ import annotations

import argparse
import faulthandler
import sys
from pathlib import Path


def main() -> None:
    options = _parser().parse_args()
    # Heavy, and not needed to print --help.
    from fakevllm_server.backends.base import BackendError
    from fakevllm_server.backends.door import serve
    from fakevllm_server.backends.embedded.engine import EmbeddedEngine, EngineConfig

    # A crash inside torch leaves no Python traceback otherwise.
    faulthandler.enable()
    config = EngineConfig(
        model=_folder(options.model, options.allow_hub),
        served_model_name=options.served_model_name,
        seed=options.seed,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        device=options.device,
        dtype=options.dtype,
        torch_threads=options.torch_threads,
    )
    try:
        engine = EmbeddedEngine(config)
    # The user's mistake: one line, no traceback.
    except BackendError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    serve(engine, engine, options.socket, on_close=engine.close)


def _folder(model: str, allow_hub: bool) -> Path:
    """A hub name becomes the folder its files are downloaded to."""
    if not allow_hub or Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    # No pickles and no code: weights are safetensors, and nothing in the folder is run.
    return Path(
        snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"])
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fakevllm_server.backends.embedded", description=__doc__
    )
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to answer on")
    parser.add_argument("--model", required=True, help="model folder in Hugging Face form")
    parser.add_argument("--allow-hub", action="store_true", help="--model may be a hub name")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--run-dir", type=Path, required=True, help="the server's run directory")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--torch-threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
