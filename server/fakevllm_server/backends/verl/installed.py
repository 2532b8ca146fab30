"""Whether what this trainer stands on is installed, told without importing it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from fakevllm_server.types.backend import BackendRefused

KNOWN_VERL = "0.9."
"""Its worker classes carry no promise from one minor version to the next."""
HOW_TO_INSTALL = (
    "install it with `pip install -e '.[verl]'`, or, on a machine without a GPU, with "
    "`server/cpu/make_environment.sh FOLDER`"
)


def check_installed(version_of: Callable[[str], str] = metadata.version) -> None:
    """Raises BackendRefused, with what to install."""
    for package in ("ray", "verl"):
        try:
            version_of(package)
        except metadata.PackageNotFoundError:
            raise BackendRefused(
                f"the verl trainer needs {package}, which is not installed: {HOW_TO_INSTALL}"
            ) from None
    if not version_of("verl").startswith(KNOWN_VERL):
        raise BackendRefused(
            f"the verl trainer knows verl {KNOWN_VERL}x, and {version_of('verl')} is installed: "
            f"{HOW_TO_INSTALL}"
        )
