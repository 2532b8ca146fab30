"""The packages that each engine needs, and the time that an engine's process may take to start.

The server starts the engines. The commands `fakevllm demo` and `fakevllm train` start a server and
wait for its engines, so they use the same times.
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
"""For each engine, the Python modules that must be installed."""

BOOT_TIMEOUT_S = 600.0
"""Seconds that the process of an engine may take until it is ready. This is enough to load a large
model from a slow disk."""
VLLM_BOOT_TIMEOUT_S = 1800.0
"""Seconds that a vLLM process may take until it is ready. vLLM not only loads a large model but
also compiles it."""


def is_installed(module: str) -> bool:
    """Return True if this Python can import the module. The module is not imported."""
    return importlib.util.find_spec(module) is not None


def check_installed(
    engines: Iterable[str], is_installed: Callable[[str], bool] = is_installed
) -> None:
    """Raise ConfigError if one of the engines needs a package that is missing. Call this function
    before any process is started, so that the error leaves no process behind."""
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
    """Return the start timeout, in seconds, of a server that starts the processes of these engines
    one after the other."""
    return sum(VLLM_BOOT_TIMEOUT_S if name == "vllm" else BOOT_TIMEOUT_S for name in engines)
