"""Packages from npm, each installed once into $FAKEVLLM_E2E_CACHE or pytest's cache folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from examples.opencode.opencode_command import PACKAGE

AXE_CORE = "axe-core@4.14.1"
INSTALL_TIMEOUT_S = 600.0


def install_opencode(config: pytest.Config) -> Path:
    """Install opencode if needed, and return its command; skip the test if npm is missing."""
    return install_npm_package(config, PACKAGE, ".bin/opencode")


def install_axe_core(config: pytest.Config) -> Path:
    """Install axe-core if needed, and return its script; skip the test if npm is missing."""
    return install_npm_package(config, AXE_CORE, "axe-core/axe.min.js")


def install_npm_package(config: pytest.Config, package: str, file: str) -> Path:
    """Install an npm package if needed, and return the path of a file in its node_modules; skip the
    test if npm is missing."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip(f"npm is not installed, so {package} cannot be installed")
    cache_folder = os.environ.get("FAKEVLLM_E2E_CACHE")
    cache = config.cache
    assert cache is not None
    folder = Path(cache_folder) / package if cache_folder else cache.mkdir(package)
    installed = folder / "node_modules" / file
    if not installed.exists():
        folder.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", package]
        subprocess.run(install, check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True)
    return installed
