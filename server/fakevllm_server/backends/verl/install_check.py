"""Check that Ray and a tested version of verl are installed, without importing them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import metadata

from fakevllm_server.types.backend import BackendRefused

TESTED_VERL = "0.9."
"""Prefix of the tested versions of verl. verl's worker classes may change in any minor version."""
HOW_TO_INSTALL = (
    "install it with `pip install -e '.[verl]'`, or, on a machine without a GPU, with "
    "`server/cpu/make_environment.sh FOLDER`"
)


def check_installed(version_of: Callable[[str], str] = metadata.version) -> None:
    """Raise BackendRefused if Ray or verl is not installed, or if the version of verl is untested.
    The message has the command that installs the packages."""
    for package in ("ray", "verl"):
        try:
            version_of(package)
        except metadata.PackageNotFoundError:
            raise BackendRefused(
                f"the verl trainer needs {package}, which is not installed: {HOW_TO_INSTALL}"
            ) from None
    if not version_of("verl").startswith(TESTED_VERL):
        raise BackendRefused(
            f"the verl trainer requires verl {TESTED_VERL}x, but {version_of('verl')} is "
            f"installed: {HOW_TO_INSTALL}"
        )
