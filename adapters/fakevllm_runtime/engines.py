"""The packages that each engine needs, and the time that each engine's process may take to start.

The server starts the engines. The commands `fakevllm demo` and `fakevllm train` start a server and
wait for its engines, so they use the same tables.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable

from fakevllm_runtime.errors import ConfigError

REQUIRED_MODULES = {
    "fake": (),
    "embedded": ("torch", "transformers"),
    "vllm": ("vllm",),
    "verl": ("verl", "ray"),
}
"""Engine -> Python modules that must be installed."""

BOOT_TIMEOUT_S = 600.0
"""Seconds that the process of an engine may take until it is ready. A large model can be loaded
from a slow disk in this time."""
VLLM_BOOT_TIMEOUT_S = 1800.0
"""Seconds that a vLLM process may take until it is ready. Loading and compiling a large model takes
long."""


def is_installed(module: str) -> bool:
    """Return whether this Python can import a module. The module is not imported."""
    return importlib.util.find_spec(module) is not None


def check_installed(
    engines: Iterable[str], is_installed: Callable[[str], bool] = is_installed
) -> None:
    """Raise ConfigError if a package of one of the engines is missing. Call this function before
    any process is started, so that no process must be stopped after the error."""
    for engine in engines:
        missing = [module for module in REQUIRED_MODULES[engine] if not is_installed(module)]
        if missing:
            raise ConfigError(
                f"The {engine} engine needs {' and '.join(missing)}, not installed in this "
                f"Python: {install_hint(engine)}"
            )


def install_hint(engine: str) -> str:
    """Return the command that installs an engine's packages."""
    command = f"pip install -e '.[{engine}]'"
    if engine == "embedded":
        return command
    return f"{command} where there is a GPU, else server/cpu/make_environment.sh FOLDER"


def boot_timeout_s(engines: Iterable[str]) -> float:
    """Return the seconds that a server may take to start the processes of the engines one after
    another."""
    return sum(VLLM_BOOT_TIMEOUT_S if name == "vllm" else BOOT_TIMEOUT_S for name in engines)
