"""Read the instructions of a Dockerfile, and what `.dockerignore` leaves out. Only the syntax that
this project uses is known; anything else is an error.

>>> [step] = parse('RUN echo a \\\\\\n    && echo b')
>>> step.name, step.text
('RUN', 'echo a     && echo b')
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, cast

# fmt: off
KNOWN = ("FROM", "ARG", "ENV", "RUN", "COPY", "USER", "WORKDIR", "VOLUME", "EXPOSE", "HEALTHCHECK",
         "STOPSIGNAL", "CMD")
# fmt: on
ROOT_FOLDER = PurePosixPath("/")
VARIABLE = re.compile(r"\$(?:(?P<bare>\w+)|{(?P<name>\w+)})")


class DockerfileError(ValueError):
    """Raised for an instruction that is wrong or not known here."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, such as `COPY . /opt/source/`."""

    name: str
    text: str
    line: int

    def error(self, problem: str) -> DockerfileError:
        return DockerfileError(f"line {self.line}: {self.name} {self.text}: {problem}")


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """The command of HEALTHCHECK, and its options without the two dashes."""

    command: list[str]
    options: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says about its containers."""

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    user: str = "0:0"
    folder: PurePosixPath = ROOT_FOLDER
    volumes: tuple[str, ...] = ()
    ports: tuple[int, ...] = ()
    command: tuple[str, ...] = ()
    health_check: HealthCheck | None = None


def parse(text: str) -> list[Instruction]:
    """Return the instructions. Comments are left out, and continued lines are joined. Raises
    DockerfileError for an unknown instruction."""
    instructions: list[Instruction] = []
    parts: list[str] = []
    first_line = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#") or not (line.strip() or parts):
            continue
        first_line = first_line if parts else number
        parts.append(line.removesuffix("\\"))
        if line.endswith("\\"):
            continue
        name, _, rest = "".join(parts).strip().partition(" ")
        parts = []
        instruction = Instruction(name.upper(), rest.strip(), first_line)
        if instruction.name not in KNOWN or not instruction.text:
            raise instruction.error("unknown or empty")
        instructions.append(instruction)
    if parts:
        raise DockerfileError(f"line {first_line}: the last line is continued")
    return instructions


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace `$NAME` and `${NAME}`. An unknown variable is empty.

    >>> expand("/bin:${PATH}", {"PATH": "/usr/bin"})
    '/bin:/usr/bin'
    """
    return VARIABLE.sub(lambda match: variables.get(match["bare"] or match["name"], ""), text)


def assignments(instruction: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the values that ENV or ARG sets. All of them see the variables before it."""
    values: dict[str, str] = {}
    for word in shlex.split(instruction.text):
        name, equals, value = word.partition("=")
        if not equals:
            raise instruction.error("write NAME=VALUE")
        values[name] = expand(value, variables)
    return values


def exec_form(instruction: Instruction, text: str | None = None) -> list[str]:
    """Return the words of a JSON list, such as those of CMD. Raises DockerfileError for the shell
    form, in which a shell would be process 1 and get the signals."""
    try:
        words: Any = json.loads(instruction.text if text is None else text)
    except ValueError:
        raise instruction.error('write the command as ["program", "argument"]') from None
    if not (isinstance(words, list) and words):
        raise instruction.error("the command is no list of words")
    return [str(word) for word in cast(list[Any], words)]


def health_check(instruction: Instruction) -> HealthCheck:
    """Return the command and the options of HEALTHCHECK."""
    before, found, command = instruction.text.partition("CMD ")
    if not found:
        raise instruction.error("it has no CMD")
    options = dict(
        word.removeprefix("--").split("=", 1) for word in before.split() if word.startswith("--")
    )
    return HealthCheck(exec_form(instruction, command), options)


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """The rules of `.dockerignore`. The last rule that matches a file, or a folder above it,
    decides.

    >>> rules = IgnoreRules.parse("*\\n!server\\n**/*.pyc")
    >>> rules.ignores("server/a.py"), rules.ignores("server/a/b.pyc"), rules.ignores("deploy/.env")
    (False, True, True)
    """

    rules: Sequence[tuple[re.Pattern[str], bool]]
    """Patterns, and whether what they match is left out."""

    @staticmethod
    def parse(text: str) -> IgnoreRules:
        lines = [line.strip() for line in text.splitlines()]
        kept = [line for line in lines if line and not line.startswith("#")]
        return IgnoreRules(
            [(_pattern(line.removeprefix("!")), not line.startswith("!")) for line in kept]
        )

    def ignores(self, path: str) -> bool:
        """Return True if the file with this path below the build's folder is left out."""
        file = PurePosixPath(path)
        names = [str(one) for one in (file, *file.parents)]
        is_ignored = False
        for pattern, ignores in self.rules:
            if any(pattern.fullmatch(name) for name in names):
                is_ignored = ignores
        return is_ignored


def _pattern(rule: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", rule.strip("/"))
    translated = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(translated.get(part) or re.escape(part) for part in parts))


def final_config(instructions: Sequence[Instruction]) -> ImageConfig:
    """Return the settings of the image, as they are after the last instruction."""
    config = ImageConfig()
    arguments: dict[str, str] = {}
    for instruction in instructions:
        if instruction.name == "ARG":
            arguments |= assignments(instruction, arguments | dict(config.environment))
        config = apply(config, instruction, arguments)
    return config


def apply(
    config: ImageConfig, instruction: Instruction, arguments: Mapping[str, str]
) -> ImageConfig:
    """Return the settings after one instruction. `arguments` are the values of ARG."""
    variables = dict(arguments) | dict(config.environment)
    text = expand(instruction.text, variables)
    values = {name: getattr(config, name) for name in ImageConfig.__dataclass_fields__}
    match instruction.name:
        case "ENV":
            new = assignments(instruction, {"PATH": DEFAULT_PATH} | variables)
            values["environment"] = dict(config.environment) | new
        case "USER":
            values["user"] = text
        case "WORKDIR":
            values["folder"] = config.folder / text
        case "VOLUME":
            values["volumes"] = (*config.volumes, *text.split())
        case "EXPOSE":
            values["ports"] = (*config.ports, *map(int, text.split()))
        case "HEALTHCHECK":
            values["health_check"] = health_check(instruction)
        case "CMD":
            values["command"] = tuple(exec_form(instruction))
        case _:
            return config
    return ImageConfig(**values)


DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of the base images."""
