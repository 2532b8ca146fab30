"""LiteLLM's proxy in front of a server, for comparison in `benchmarks.proxy_overhead`.

    python -m benchmarks.proxy_parts.litellm_proxy --upstream http://127.0.0.1:10086 --port 8002

LiteLLM's dependencies conflict with those of this project. Therefore LiteLLM runs in its own
virtual environment, in the folder `--environment`. The environment is created if it does not exist.
LiteLLM runs in its leanest form: one worker, no database, no callbacks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import venv
from pathlib import Path

VERSION = "1.106.2"
ENVIRONMENT = Path.home() / ".cache/fakevllm/litellm"
_CONFIG = """
model_list:
  - model_name: fake
    litellm_params: {{model: openai/fake, api_base: "{upstream}/v1", api_key: none}}
litellm_settings: {{telemetry: false, num_retries: 0}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""


def prepare_environment(folder: Path) -> Path:
    """Create a virtual environment with LiteLLM if there is none. Return its Python."""
    python = folder / "bin/python"
    if not (folder / "bin/litellm").exists():
        venv.create(folder, with_pip=True)
        packages = [f"litellm[proxy]=={VERSION}"]
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--upstream", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT)
    parser.add_argument("--until-stdin-closes", action="store_true")
    args = parser.parse_args()
    config = Path.cwd() / "litellm.yaml"
    config.write_text(_CONFIG.format(upstream=args.upstream))
    python = prepare_environment(args.environment)
    # LiteLLM must run in this process, because the benchmark measures the CPU time of its pid.
    os.execv(python, [str(python), __file__, "--inside", str(config), str(args.port)])


def _run_litellm(config: str, port: str) -> None:
    from litellm.proxy.proxy_cli import (  # pyright: ignore[reportMissingImports]
        run_server,  # pyright: ignore[reportUnknownVariableType]
    )

    threading.Thread(target=_exit_with_parent, daemon=True).start()
    sys.argv = ["litellm", "--config", config, "--host", "127.0.0.1", "--port", port]
    run_server()


def _exit_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        _run_litellm(*sys.argv[2:])
    else:
        main()
