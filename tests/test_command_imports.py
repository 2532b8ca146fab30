"""Each command imports only the packages that it uses.

Every command runs in a fresh interpreter, in an empty folder. A command that needs a proxy or a
server gets the address of none, so it ends with an error, after its imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fakevllm.ledger.store import Ledger
from tests.e2e.processes import free_port

pytestmark = pytest.mark.slow  # about thirty interpreters

HEAVY = frozenset(
    {
        *("torch", "transformers", "ray", "vllm", "verl", "numpy", "matplotlib", "tensorboard"),
        *("fastapi", "starlette", "uvicorn", "uvloop", "httptools", "prometheus_client"),
        *("sqlalchemy", "sqlmodel", "aiohttp", "httpx", "openai", "rich", "textual", "yaml"),
        *("tenacity", "asyncio", "multiprocessing", "opentelemetry", "pydantic"),
    }
)
"""Packages that take long to import."""
CONFIG = frozenset({"pydantic"})
"""Packages that read settings and keys."""
LEDGER = frozenset({"sqlalchemy", "asyncio", "pydantic"})
"""SQLAlchemy imports asyncio."""
HTTPX = frozenset({"httpx", "asyncio", "rich", "pydantic"})
"""httpx imports rich if rich is installed, for its own command line. All commands that use httpx
read settings."""
REPORT = """
import atexit, importlib, sys
heavy, module, *arguments = sys.argv[1:]
def report():
    loaded = sorted(name for name in heavy.split(",") if name in sys.modules)
    with open("loaded.json", "w") as file:
        file.write(str(loaded).replace("'", '"'))
atexit.register(report)
sys.argv = [module, *arguments]
program = importlib.import_module(module)
if arguments:
    program.main()
"""
PROXY, SERVER = "fakevllm.cli.main", "fakevllm_server.cli.main"
CASES: dict[str, tuple[str, str, frozenset[str]]] = {
    "fakevllm --help": (PROXY, "--help", frozenset()),
    "fakevllm --version": (PROXY, "--version", frozenset()),
    "serve --help": (PROXY, "serve --help", frozenset()),
    "demo --help": (PROXY, "demo --help", frozenset()),
    "train --help": (PROXY, "train --help", frozenset()),
    "up --help": (PROXY, "up --help", frozenset()),
    "console --help": (PROXY, "console --help", frozenset()),
    "down": (PROXY, "down", CONFIG | {"asyncio"}),
    "replay --help": (PROXY, "replay --help", frozenset()),
    "tokens --help": (PROXY, "tokens --help", frozenset()),
    "status": (PROXY, "status --url {absent}", frozenset({"rich"})),
    "pause": (PROXY, "pause --url {absent}", frozenset()),
    "pause, by the configuration": (PROXY, "pause", CONFIG),
    "keys add": (PROXY, "keys add app", CONFIG),
    "keys list": (PROXY, "keys list", CONFIG | {"rich"}),
    "keys revoke": (PROXY, "keys revoke app", CONFIG),
    "sessions": (PROXY, "sessions --run-dir .", LEDGER | {"rich"}),
    "tokens": (PROXY, "tokens --run-dir .", LEDGER | {"rich"}),
    "check-hook": (
        PROXY,
        "check-hook {hooks}",
        CONFIG | {"asyncio", "rich", "multiprocessing"},
    ),
    "replay": (
        PROXY,
        "replay --dataset tasks.jsonl --url {absent}",
        CONFIG | {"asyncio", "aiohttp", "rich"},
    ),
    "export": (
        PROXY,
        "export --as sft --to rows.jsonl --ledger ledger.sqlite",
        LEDGER | {"rich"},
    ),
    "import": (PROXY, "import tasks.jsonl --to rows.jsonl", CONFIG | {"rich"}),
    "overwatch": (PROXY, "overwatch --once --swarm-url {absent}", HTTPX),
    "train": (PROXY, "train --conf absent.yaml", HTTPX | {"yaml"}),
    "fakevllm-server --help": (SERVER, "--help", frozenset()),
    "fakevllm-server --version": (SERVER, "--version", frozenset()),
    "start --help": (SERVER, "start --help", frozenset()),
    "runs --help": (SERVER, "runs --help", frozenset()),
    "runs": (SERVER, "runs", LEDGER | {"sqlmodel"}),
    "curves": (SERVER, "curves", LEDGER | {"sqlmodel"}),
    "checkpoints --help": (SERVER, "checkpoints --help", frozenset()),
    "checkpoints list": (SERVER, "checkpoints list", LEDGER | {"sqlmodel", "rich"}),
    "the modules of a running proxy": (
        "fakevllm.web.app",
        "",
        LEDGER
        | {"fastapi", "starlette", "uvicorn", "httptools", "multiprocessing"}
        | {"aiohttp", "prometheus_client", "tenacity"},
    ),
    "the modules of a running console": (
        "fakevllm.console.command",
        "",
        LEDGER
        | {"fastapi", "starlette", "uvicorn", "httptools", "multiprocessing"}
        | {"prometheus_client"}
        | HTTPX,
    ),
    "the modules of a running server": (
        "fakevllm_server.web.http_server",
        "",
        LEDGER
        | {"fastapi", "starlette", "uvicorn", "httptools", "multiprocessing"}
        | {"aiohttp", "sqlmodel"},
    ),
    "the modules of the hook process": (
        "fakevllm.hooks.process_main",
        "",
        CONFIG | {"asyncio"},
    ),
}
"""By name: module, arguments, and the packages that the command uses."""


@pytest.mark.parametrize("name", CASES)
def test_a_command_imports_no_package_that_it_does_not_use(name: str, tmp_path: Path) -> None:
    module, arguments, used = CASES[name]
    (tmp_path / "tasks.jsonl").write_text('{"question": "1 + 1?"}\n')
    Ledger.open(tmp_path / "ledger.sqlite").close()
    hooks = Path(__file__).parent.parent / "fakevllm/demo/hooks"
    line = arguments.format(absent=f"http://127.0.0.1:{free_port()}", hooks=hooks)
    command = [sys.executable, "-c", REPORT, ",".join(sorted(HEAVY)), module, *line.split()]
    subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False)
    loaded: list[Any] = json.loads((tmp_path / "loaded.json").read_text())
    assert set(loaded) <= used
