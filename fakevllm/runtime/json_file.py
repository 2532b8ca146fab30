"""The file that a command writes with the flag --json."""

from __future__ import annotations

from pathlib import Path

import orjson

from fakevllm.errors import ConfigError


def write_json(file: Path, value: object) -> None:
    """Write a value as JSON. Missing folders are created.

    Raises ConfigError if the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written ({error.strerror}): set --json.") from None
