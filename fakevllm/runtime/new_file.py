"""Write a file that appears under its name only when it is complete."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fakevllm.errors import ConfigError


@contextmanager
def new_file(target: Path) -> Generator[IO[bytes]]:
    """Yield a temporary file beside `target`, which only its owner can read. It is renamed to
    `target` when the `with` block ends. If the block raises an exception, no file is left, and an
    older file `target` stays as it is.

    Raises ConfigError for an OSError in the block, because the block writes to the file.
    """
    try:
        with _temporary_file(target) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise _not_written(target, error) from None


@contextmanager
def _temporary_file(target: Path) -> Generator[IO[bytes]]:
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    folder = target.absolute().parent
    number, name = tempfile.mkstemp(dir=folder, prefix=f".{target.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(number, "wb") as file:
            yield file
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _not_written(target: Path, error: OSError) -> ConfigError:
    cause = error.strerror or str(error)
    if isinstance(error, FileNotFoundError):
        return ConfigError(f"The folder of {target} does not exist: create it.")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ConfigError(
            f"{target} was not written ({cause}): free some space, or name a file on another disk "
            "with --to."
        )
    return ConfigError(f"{target} cannot be written ({cause}): name another file with --to.")
