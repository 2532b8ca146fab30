"""This machine's pip settings as environment variables, and the files that they name.

An image is built with the settings of the machine that builds it: its mirrors, its certificates and
its folders of wheels. They stay out of the Dockerfile and out of the image.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LINE = re.compile(r"(?P<section>[\w:-]+)\.(?P<key>[\w.-]+)=(?P<value>.+)")
LISTS = frozenset({"find-links", "extra-index-url", "constraint"})
"""Settings whose values in a file and in the environment add up here."""


@dataclass(frozen=True, slots=True)
class PipSettings:
    """The environment variables for pip, and the files and folders that they name."""

    environment: Mapping[str, str]
    paths: tuple[Path, ...]


def read_pip_settings() -> PipSettings:
    """Return the settings of the pip of this Python."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return settings_of(listed.stdout)


def settings_of(listing: str) -> PipSettings:
    """Return the settings in the output of `pip config list`.

    >>> settings_of("global.index-url='http://mirror/simple'").environment
    {'PIP_INDEX_URL': 'http://mirror/simple'}
    """
    values: dict[str, list[str]] = {}
    for line in listing.splitlines():
        match = LINE.fullmatch(line.strip())
        if match is None or match["section"] not in (":env:", "global", "install", "user"):
            continue
        key = match["key"].lstrip(".")
        words = str(ast.literal_eval(match["value"])).split()
        values[key] = [*values.get(key, []), *words] if key in LISTS else words
    environment = {
        f"PIP_{key.upper().replace('-', '_')}": " ".join(dict.fromkeys(words))
        for key, words in values.items()
    }
    words = [word.removeprefix("file://") for listed in values.values() for word in listed]
    named = [Path(word) for word in words if word.startswith("/")]
    # The pages of a package index in a folder `simple` have links to files beside this folder.
    paths = dict.fromkeys(path.parent if path.name == "simple" else path for path in named)
    return PipSettings(environment, tuple(path for path in paths if path.exists()))
