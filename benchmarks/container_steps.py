"""Run the steps of deploy/Dockerfile in a chroot, and use the result as a container.

    python -m benchmarks.container_steps [--demo-steps 150] [--keep FOLDER] [--write]

No image registry is needed: debootstrap makes a Debian in place of the base image. The container
gets the mounts and the environment that deploy/compose.yaml gives it, a loopback device as its
network, and a user without capabilities. The table shows the size of the image, the time until the
health check succeeds, what apps get, whether SIGTERM stops it, and what the demo learns with and
without /dev/shm. It needs root on a Debian with debootstrap, and 4 GB of disk.

With --keep, the image stays in FOLDER, and the next run with this FOLDER uses it again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.container_parts.chroot_container import (
    Container,
    ContainerSettings,
    Mount,
    wait_until_healthy,
)
from benchmarks.container_parts.compose_service import environment_of, mounts_of, read_services
from benchmarks.container_parts.dockerfile import ImageConfig, final_config, parse
from benchmarks.container_parts.image_builder import BuildError, build
from benchmarks.container_parts.pip_settings import read_pip_settings
from benchmarks.results import ROOT, conditions, markdown_table, print_table, replace_section

TITLE = "container_steps"
HEADER = ("step", "result")
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
COMPOSE_FILE = DEPLOY / "compose.yaml"
SERVICE = "fakevllm"
PROGRAMS = ("debootstrap", "unshare", "nsenter", "chroot", "setpriv", "du")
HEALTHY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 380.0
DEMO_TIMEOUT_S = 1800.0
IDLE = ("sleep", "infinity")
NOBODY = 65534
ASK = """
import json, sys, urllib.request
key, host, path, body = sys.argv[1:]
headers = {"Host": host, "Content-Type": "application/json"}
headers |= {"Authorization": "Bearer " + key} if key else {}
request = urllib.request.Request("http://127.0.0.1:8000" + path, body.encode() or None, headers)
try:
    with urllib.request.urlopen(request, timeout=60) as response:
        print(response.status, response.read().decode())
except urllib.error.HTTPError as error:
    print(error.code)
"""
"""Sends one request to the proxy, and prints the status and the body."""
QUESTION = json.dumps(
    {"model": "any", "messages": [{"role": "user", "content": "What is 3 plus 4?"}]}
)


class StepFailed(Exception):
    """Raised if the container does not do what it should."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A container's image, and the folder for what containers write."""

    root: Path
    config: ImageConfig
    work: Path

    def volume(self, name: str) -> Path:
        """Create an empty folder for the runs. As Docker does for a named volume, it has the owner
        of the folder in the image."""
        folder = self.work / name
        folder.mkdir(mode=0o700)
        user = int(self.config.user.partition(":")[0])
        os.chown(folder, user, user)
        return folder

    def settings(
        self, volume: Path, key: str = "", *, is_read_only: bool = False
    ) -> ContainerSettings:
        """Return what deploy/compose.yaml says about the container."""
        service = read_services(COMPOSE_FILE)[SERVICE]
        mounts = tuple(
            Mount(
                volume if mount.is_volume else DEPLOY / mount.source,
                mount.target,
                mount.is_read_only or (mount.is_volume and is_read_only),
            )
            for mount in mounts_of(service)
        )
        return ContainerSettings(mounts, environment_of(service, {"FAKEVLLM_KEY": key}))

    def start(self, settings: ContainerSettings, command: Sequence[str], name: str) -> Container:
        return Container(self.root, self.config, settings, command, self.work / f"{name}.log")


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    if problem := _missing_needs():
        print(f"container_steps: {problem}", file=sys.stderr)
        raise SystemExit(2)
    signal.signal(signal.SIGTERM, _exit)  # so that the containers end too
    about = conditions()
    work = Path(tempfile.mkdtemp(prefix="fakevllm-container-"))
    try:
        root = work / "image" if options.keep is None else options.keep.absolute()
        is_old = root.exists()
        rows = _measure(root, work, options.demo_steps)
    except (BuildError, StepFailed) as error:
        print(f"container_steps: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        _remove(work)
    print_table(HEADER, rows)
    if options.write and not is_old:
        replace_section(TITLE, f"{about}\n{markdown_table(HEADER, rows)}")


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)


def _measure(root: Path, work: Path, demo_steps: int) -> list[tuple[str, str]]:
    """Build the image in `root`, unless it is there already, and return the rows of the table."""
    rows = [] if root.exists() else _build(root)
    measured = Measured(root, final_config(parse(DOCKERFILE.read_text())), work)
    rows += _serving(measured)
    rows += _demos(measured, demo_steps)
    rows += _refusals(measured)
    return rows


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo-steps", type=int, default=150)
    parser.add_argument("--keep", type=Path, help="folder of the image, for repeated runs")
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md")
    return parser.parse_args(arguments)


def _missing_needs() -> str | None:
    if os.geteuid() != 0:
        return "a chroot and namespaces need root: run it as root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} cannot be found: install debootstrap and util-linux"
    return None


def _build(root: Path) -> list[tuple[str, str]]:
    """Build the image, and move it to `root` when it is complete."""
    started = time.monotonic()
    unfinished = root.with_name(f"{root.name}.unfinished")
    _remove(unfinished)
    unfinished.mkdir(parents=True)
    build(DOCKERFILE, ROOT, unfinished, read_pip_settings(), {})
    unfinished.rename(root)
    seconds = time.monotonic() - started
    packages = _megabytes(root / "opt/fakevllm/lib")
    return [
        ("the steps of the Dockerfile", f"{seconds:.0f} s"),
        ("size of the image", f"{_megabytes(root):,} MB, of which {packages:,} MB are packages"),
    ]


def _megabytes(folder: Path) -> int:
    command = ["du", "-sxm", str(folder)]
    return int(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    )


def _serving(measured: Measured) -> list[tuple[str, str]]:
    """Start the container as deploy/compose.yaml does, and ask it as an app and as Prometheus."""
    volume = measured.volume("runs")
    key = _new_key(measured, volume, "ops", "admin")
    prometheus_key = _new_key(measured, volume, "prometheus", "client")
    assert measured.config.health_check is not None, "The image has no health check."
    with measured.start(measured.settings(volume, key), measured.config.command, "up") as container:
        seconds = wait_until_healthy(
            container, measured.config.health_check.command, HEALTHY_TIMEOUT_S
        )
        answer = _ask(container, key, "127.0.0.1:8000", "/v1/chat/completions", QUESTION)
        refused = _ask(container, "", "127.0.0.1:8000", "/v1/chat/completions", QUESTION)
        metrics = _ask(container, prometheus_key, "fakevllm:8000", "/metrics")
        _require(answer.startswith("200 "), f"The app got {answer}.")
        _require(refused == "401", f"A request without a key got {refused}.")
        _require("fakevllm_engine_state" in metrics, f"Prometheus got {metrics[:200]}.")
        text = json.loads(answer.partition(" ")[2])["choices"][0]["message"]["content"]
        started = time.monotonic()
        container.send(signal.SIGTERM)
        code = container.wait(STOP_TIMEOUT_S)
        stop_s = time.monotonic() - started
        _require(code == 0, f"SIGTERM ended it with {code}: {container.log.read_text()[-2000:]}")
    return [
        ("from the start until it is healthy", f"{seconds:.1f} s"),
        ("an app asks `What is 3 plus 4?`", f"`{text}`; without a key: status 401"),
        ("Prometheus reads /metrics", "status 200, with the key of a client"),
        ("from SIGTERM to the end", f"{stop_s:.1f} s, exit code 0"),
    ]


def _new_key(measured: Measured, volume: Path, name: str, role: str) -> str:
    with measured.start(measured.settings(volume), IDLE, f"key-{name}") as container:
        _await_start(container)
        done = container.run(["fakevllm", "keys", "add", name, "--role", role])
    _require(done.returncode == 0, done.stderr)
    return done.stdout.strip()


def _await_start(container: Container) -> None:
    wait_until_healthy(container, ["true"], 30.0)


def _ask(container: Container, key: str, host: str, path: str, body: str = "") -> str:
    done = container.run(["python", "-c", ASK, key, host, path, body], timeout_s=90.0)
    _require(done.returncode == 0, done.stderr)
    return done.stdout.strip()


def _demos(measured: Measured, steps: int) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, has_shm in (("with /dev/shm", True), ("without /dev/shm", False)):
        volume = measured.volume(f"demo-{has_shm}")
        settings = replace(measured.settings(volume), has_shm=has_shm)
        command = ["fakevllm", "demo", "--steps", str(steps)]
        command += ["--run-dir", "runs/demo", "--json", "runs/demo.json"]
        with measured.start(settings, command, f"demo-{has_shm}") as container:
            code = container.wait(DEMO_TIMEOUT_S)
            _require(
                code == 0, f"The demo {name} ended with {code}: {container.log.read_text()[-2000:]}"
            )
        numbers = json.loads((volume / "demo.json").read_text())
        rows.append(
            (
                f"`fakevllm demo --steps {steps}`, {name}",
                f"right answers: {numbers['before']:.0%} before, {numbers['after']:.0%} after; "
                f"{numbers['wall_s']:.0f} s",
            )
        )
    return rows


def _refusals(measured: Measured) -> list[tuple[str, str]]:
    """Start the container with the volume of `_serving`, which it may not use any more."""
    volume = measured.work / "runs"
    read_only = _refusal(measured, measured.settings(volume, is_read_only=True), "read-only")
    for path in (volume, *volume.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    foreign = _refusal(measured, measured.settings(volume), "foreign")
    return [
        ("the same volume, read-only", f"exit code 2: {read_only}"),
        ("the same volume, of another user", f"exit code 2: {foreign}"),
    ]


def _refusal(measured: Measured, settings: ContainerSettings, name: str) -> str:
    with measured.start(settings, measured.config.command, name) as container:
        code = container.wait(60.0)
    lines = container.log.read_text().strip().splitlines()
    _require(code == 2 and len(lines) == 1, f"It ended with {code} and the lines {lines}.")
    return lines[0]


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise StepFailed(problem)


def _remove(folder: Path) -> None:
    """Delete the folder, if it exists. Raises StepFailed if something is mounted below it. (All
    mounts are in namespaces that have ended, so this would be a mistake of this script.)"""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    mounted = [path for line in lines if (path := Path(line.split()[4])).is_relative_to(folder)]
    _require(not mounted, f"{mounted} are still mounted, so {folder} is not deleted.")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
