"""Carry out the steps of a Dockerfile in a chroot.

The base image `python:X.Y-slim-SUITE` is replaced by debootstrap's Debian SUITE, whose own Python
must be X.Y. Every command runs in a mount namespace of its own, so no mount outlives it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.container_parts.dockerfile import (
    DEFAULT_PATH,
    IgnoreRules,
    ImageConfig,
    Instruction,
    apply,
    assignments,
    parse,
)
from benchmarks.container_parts.pip_settings import PipSettings

BASE = re.compile(r"python:(?P<python>3\.\d+)-slim-(?P<suite>\w+)")
PACKAGES = "ca-certificates,python3,python3-venv"
"""Debian packages that stand for what the base image has."""
STEP_TIMEOUT_S = 1800.0
APT_FOLDER = Path("/etc/apt")


class BuildError(Exception):
    """Raised if a step of the Dockerfile fails."""


@dataclass(slots=True)
class Image:
    """An image that is being built in a folder."""

    root: Path
    config: ImageConfig = field(default_factory=ImageConfig)
    arguments: dict[str, str] = field(default_factory=dict[str, str])


def build(
    dockerfile: Path, context: Path, root: Path, pip: PipSettings, arguments: Mapping[str, str]
) -> None:
    """Build an image in the empty folder `root`. `arguments` are the values of `docker build
    --build-arg`. Raises BuildError if a step fails."""
    image = Image(root)
    ignored = IgnoreRules.parse((context / ".dockerignore").read_text())
    for step in parse(dockerfile.read_text()):
        text = " ".join(step.text.split())
        print(f"{dockerfile.name}:{step.line}: {step.name} {text[:100]}", flush=True)
        match step.name:
            case "FROM":
                _make_base(step, root)
            case "ARG":
                declared = assignments(step, image.arguments)
                image.arguments |= declared | {
                    name: value for name, value in arguments.items() if name in declared
                }
            case "RUN":
                _run(image, step, pip)
            case "COPY":
                _copy(image, step, context, ignored)
            case _:
                image.config = apply(image.config, step, image.arguments)


def debian_mirror(suite: str) -> str:
    """Return the address of the Debian mirror that this machine uses for `suite`."""
    files = [*APT_FOLDER.glob("sources.list"), *APT_FOLDER.glob("sources.list.d/*")]
    for file in sorted(files):
        text = file.read_text()
        for stanza in text.split("\n\n"):  # the format deb822
            fields = dict(re.findall(r"(?m)^(\w[\w-]*): *(.*)$", stanza))
            if suite in fields.get("Suites", "").split():
                return fields["URIs"].split()[0]
        if found := re.search(rf"(?m)^deb (?:\[.*\] )?(\S+) {suite} ", text):
            return found[1]
    raise BuildError(f"No file below {APT_FOLDER} names a mirror for {suite}.")


def _make_base(step: Instruction, root: Path) -> None:
    match = BASE.fullmatch(step.text)
    if match is None:
        raise step.error("only python:X.Y-slim-SUITE can be replaced by a Debian")
    suite = match["suite"]
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}"]
    _check(step, [*command, suite, str(root), debian_mirror(suite)])
    reported = subprocess.run(
        ["chroot", root, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if reported.stdout.strip() != match["python"]:
        raise step.error(f"Debian {suite} has Python {reported.stdout.strip()}")
    clean = "apt-get clean && rm -rf /var/lib/apt/lists/*"  # as in the base image
    _check(step, ["chroot", str(root), "sh", "-c", clean])


def _run(image: Image, step: Instruction, pip: PipSettings) -> None:
    """Run a command as the build's user in the chroot. The files of the pip settings, /proc and the
    addresses of name servers are mounted for this command only."""
    mounts = [*pip.paths, Path("/etc/resolv.conf").resolve()]
    targets = [image.root / str(path).lstrip("/") for path in pip.paths]
    targets.append(image.root / "etc/resolv.conf")
    made = [made for pair in zip(mounts, targets, strict=True) for made in _make_target(*pair)]
    script = ["set -e", f"mount -t proc proc '{image.root}/proc'"]
    script += [f"mount --bind /dev '{image.root}/dev'"]
    for source, target in zip(mounts, targets, strict=True):
        script.append(f"mount --bind '{source}' '{target}'")
        script.append(f"mount -o remount,ro,bind '{target}'")
    script.append('exec "$@"')
    user, _, group = image.config.user.partition(":")
    environment = {"PATH": DEFAULT_PATH} | image.arguments | dict(image.config.environment)
    inside = f"cd {image.config.folder} && {step.text}"
    try:
        _check(
            step,
            [
                *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
                *("sh", "-c", "\n".join(script), "sh"),
                *("chroot", f"--userspec={user}:{group or user}", str(image.root)),
                *("env", "-i", *_words(environment | dict(pip.environment))),
                *("/bin/sh", "-c", inside),
            ],
        )
    finally:
        for path in reversed(made):
            path.rmdir() if path.is_dir() else path.unlink()


def _make_target(source: Path, target: Path) -> list[Path]:
    """Create what a mount of `source` needs, and return the new paths, outermost first."""
    missing = [path for path in (target, *target.parents) if not path.exists()][::-1]
    for path in missing:
        if path == target and source.is_file():
            path.touch()
        else:
            path.mkdir()
    return missing


def _copy(image: Image, step: Instruction, context: Path, ignored: IgnoreRules) -> None:
    """Copy files of the build's folder. Like Docker, copy the content of a folder, and give it to
    root."""
    *sources, target = step.text.split()
    if not sources or not target.endswith("/") or any(word.startswith("--") for word in sources):
        raise step.error("write COPY SOURCE FOLDER/")
    folder = image.root / target.lstrip("/")
    for source in sources:
        top = context / source
        files = [top] if top.is_file() else sorted(kept_files(context, top, ignored))
        if not files:
            raise step.error(f"{source} does not exist, or .dockerignore leaves it out")
        for file in files:
            copy = folder / (file.name if file == top else file.relative_to(top))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
            os.chown(copy, 0, 0)


def kept_files(context: Path, folder: Path, ignored: IgnoreRules) -> list[Path]:
    """Return the files below `folder` that `.dockerignore` does not leave out."""
    return [
        file
        for parent, _, names in os.walk(folder)
        for file in (Path(parent) / name for name in names)
        if not ignored.ignores(str(file.relative_to(context)))
    ]


def _words(environment: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in environment.items()]


def _check(step: Instruction, command: Sequence[str]) -> None:
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=STEP_TIMEOUT_S,
    )
    if done.returncode != 0:
        last_lines = "\n".join(done.stdout.splitlines()[-20:])
        raise BuildError(f"line {step.line}: exit code {done.returncode}\n{last_lines}")
