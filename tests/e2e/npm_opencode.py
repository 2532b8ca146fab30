"""The npm package of opencode, installed once into $FAKEVLLM_E2E_CACHE or pytest's cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from examples.opencode.opencode_command import PACKAGE

INSTALL_TIMEOUT_S = 600.0


def install_opencode(config: pytest.Config) -> Path:
    """Install opencode if needed, and return its command; skip the test if npm is missing."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    cache_folder = os.environ.get("FAKEVLLM_E2E_CACHE")
    cache = config.cache
    assert cache is not None
    folder = Path(cache_folder) if cache_folder else cache.mkdir("opencode")
    command = folder / "node_modules" / ".bin" / "opencode"
    if not command.exists():
        folder.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", PACKAGE]
        subprocess.run(install, check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True)
    return command
