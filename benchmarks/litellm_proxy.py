"""LiteLLM's proxy in front of the same server, as a peer for proxy_overhead.py.

    python -m benchmarks.litellm_proxy --upstream http://127.0.0.1:10086 --port 8002

Its packages do not go with ours, so it has an environment of its own, made in `--environment` where
it is not there yet. One worker, no database, no callbacks: its leanest form.
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


def environment(folder: Path) -> Path:
    """The Python of an environment with LiteLLM in it."""
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
    python = environment(args.environment)
    # The same process: its CPU time is what is measured.
    os.execv(python, [str(python), __file__, "--inside", str(config), str(args.port)])


def _inside(config: str, port: str) -> None:
    from litellm.proxy.proxy_cli import (  # pyright: ignore[reportMissingImports]
        run_server,  # pyright: ignore[reportUnknownVariableType]
    )

    threading.Thread(target=_leave_with_parent, daemon=True).start()
    sys.argv = ["litellm", "--config", config, "--host", "127.0.0.1", "--port", port]
    run_server()


def _leave_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--inside":
        _inside(*sys.argv[2:])
    else:
        main()
