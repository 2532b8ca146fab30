"""Write a file that appears under its name only when it is complete."""

from __future__ import annotations

import errno
import io
import os
import signal
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import IO, TYPE_CHECKING, cast

from fakevllm.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_STOPS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end the process, by default without any clean-up."""


@contextmanager
def new_file(target: Path) -> Generator[IO[bytes]]:
    """Yield a temporary file beside `target`. Only the owner can read the file. When the `with`
    block ends, the file is renamed to `target`. If the block raises an exception, or if SIGTERM or
    SIGHUP stops the process, no file is left, and an older file `target` stays as it is.

    Raises ConfigError if the file cannot be written. The method `write` of the yielded file raises
    ConfigError too.
    """
    folder = target.absolute().parent
    with _stopping_by_exception():
        with _named_errors(target):
            if target.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            number, name = tempfile.mkstemp(dir=folder, prefix=f".{target.name}.", suffix=".tmp")
        try:
            with _TargetFile(number, target) as file:
                yield cast(IO[bytes], file)
                file.flush()
                with _named_errors(target):
                    os.fsync(number)
            with _named_errors(target):
                os.replace(name, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise


class _TargetFile(io.BufferedWriter):
    """A file whose write errors have an exception class of their own. Therefore `new_file` can
    distinguish write errors from other errors in its `with` block."""

    def __init__(self, number: int, target: Path) -> None:
        self._target = target
        super().__init__(io.FileIO(number, "wb"))

    def write(self, buffer: ReadableBuffer, /) -> int:
        with _named_errors(self._target):
            return super().write(buffer)

    def flush(self) -> None:
        with _named_errors(self._target):
            super().flush()


@contextmanager
def _named_errors(target: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise _not_written(target, error) from None


@contextmanager
def _stopping_by_exception() -> Generator[None]:
    """Make SIGTERM and SIGHUP raise SystemExit in the block, with the exit code that a shell shows
    for the signal. Signals that are ignored, for example by nohup, stay ignored."""
    changed: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():  # only this thread can set handlers
        changed += [one for one in _STOPS if signal.getsignal(one) == signal.SIG_DFL]
    try:
        for one in changed:
            signal.signal(one, _stop)
        yield
    finally:
        for one in changed:
            signal.signal(one, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


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
