"""A run directory on a read-only file system, or of another user: each command says in one line
what to do. Such folders are common in containers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import free_port
from tests.e2e.test_commands import assert_mistake

NOBODY = 65534
HOOKS = Path(__file__).parents[2] / "deploy" / "hooks"
WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--")
"""Root without capabilities may not use the folders of other users."""
READ_ONLY = (
    *("unshare", "--mount", "sh", "-c"),
    'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"',
    "volume",
)
WITHOUT_SHM = (
    *("unshare", "--mount", "sh", "-c"),
    'mount -t tmpfs tmpfs "$0" && for name in null urandom; do touch "$0/$name" && '
    'mount --bind "/dev/$name" "$0/$name"; done && mount --rbind "$0" /dev && exec "$@"',
    "volume",
)
FAKEVLLM = (sys.executable, "-m", "fakevllm")
SERVER = (sys.executable, "-m", "fakevllm_server")
COMMANDS = {
    "up": (*FAKEVLLM, "up"),
    "up --detach": (*FAKEVLLM, "up", "--detach"),
    "serve": (*FAKEVLLM, "serve"),
    "server": (*SERVER, "start", "--backend", "fake"),
    "demo": (*FAKEVLLM, "demo", "--backend", "fake", "--steps", "1"),
    "keys": (*FAKEVLLM, "keys", "add", "bob"),
    "sessions": (*FAKEVLLM, "sessions"),
    "checkpoints": (*SERVER, "checkpoints", "list"),
    "runs": (*SERVER, "runs"),
}
WRITING = [name for name in COMMANDS if name not in ("sessions", "checkpoints", "runs")]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """A folder beside a fakevllm.toml."""
    write_hooks(tmp_path / "hooks", PREFER_YES)
    (tmp_path / "fakevllm.toml").write_text(
        f'[proxy]\nport = {free_port()}\n[console]\nport = {free_port()}\n[hooks]\npath = "hooks"\n'
        f'[server]\nbackend = "fake"\nport = {free_port()}\n'
    )
    folder = tmp_path / "volume"
    folder.mkdir(mode=0o700)
    return folder


def run(
    folder: Path, before: Sequence[str], name: str, run_dir: str
) -> subprocess.CompletedProcess[str]:
    command = [*before, *COMMANDS[name], "--run-dir", run_dir]
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )


def skip_unless_possible(before: Sequence[str], volume: Path) -> None:
    if subprocess.run([*before, "true"], cwd=volume.parent).returncode != 0:
        pytest.skip("this machine refuses mounts")


@pytest.mark.parametrize("run_dir", ["volume", "volume/new"])
@pytest.mark.parametrize("name", WRITING)
def test_a_read_only_run_directory(name: str, run_dir: str, volume: Path) -> None:
    skip_unless_possible(READ_ONLY, volume)
    done = run(volume.parent, READ_ONLY, name, run_dir)
    assert_mistake(done, "(Read-only file system): mount its file system so that it can be written")


@pytest.mark.parametrize("run_dir", ["volume", "volume/new"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_directory_of_another_user(name: str, run_dir: str, volume: Path) -> None:
    os.chown(volume, NOBODY, NOBODY)
    done = run(volume.parent, WITHOUT_CAPABILITIES, name, run_dir)
    assert_mistake(done, "volume belongs to the user ")
    assert f"change the owner with `chown -R {os.geteuid()} " in done.stderr


@pytest.mark.parametrize("name", WRITING)
def test_a_run_directory_that_may_only_be_read(name: str, volume: Path) -> None:
    os.chown(volume, NOBODY, NOBODY)
    volume.chmod(0o755)
    done = run(volume.parent, WITHOUT_CAPABILITIES, name, "volume")
    assert_mistake(done, "volume belongs to the user ")


def test_hooks_need_no_shared_memory_of_the_system(volume: Path) -> None:
    skip_unless_possible(WITHOUT_SHM, volume)
    missing = [*WITHOUT_SHM, "test", "!", "-e", "/dev/shm"]
    assert subprocess.run(missing, cwd=volume.parent).returncode == 0
    command = [*WITHOUT_SHM, *FAKEVLLM, "check-hook", str(HOOKS)]
    done = subprocess.run(command, cwd=volume.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
