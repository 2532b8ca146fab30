"""Load the accepted API keys from a key file, and reload them when the file changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from fakevllm_adapters.protocol.keys import ReloadingKeyRing
from fakevllm_runtime.errors import ConfigError
from fakevllm_runtime.path_access import unusable_message


def follow_key_file(
    file: Path, log: logging.Logger, clock: Callable[[], float] = time.monotonic
) -> ReloadingKeyRing:
    """Return the set of the API keys in `file`. The set reloads the file by itself after each
    change.

    The file may be absent. If a reload fails, the previous keys stay valid and a warning is written
    to `log`. `clock` returns the time in seconds. Raises ConfigError if the file cannot be read or
    has a malformed line.
    """
    try:
        return ReloadingKeyRing(
            lambda: _file_version(file),
            lambda: file.read_text(encoding="utf-8"),
            clock,
            lambda error: log.warning("the key file %s keeps its previous keys: %s", file, error),
        )
    except OSError as error:
        message = unusable_message(file, error, "name another one")
        raise ConfigError(f"The key file {message}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"The key file {file} is not UTF-8 text.") from None
    except ValueError as error:
        raise ConfigError(f"The key file {file}: {error}.") from None


def _file_version(file: Path) -> object:
    """Return a value that changes whenever the file changes, or None if there is no file."""
    try:
        stat = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:  # reading the file will raise the same error
        return error.errno
    return (stat.st_mtime_ns, stat.st_size, stat.st_ino)
