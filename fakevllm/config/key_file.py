"""The file with the API keys of apps. Each change replaces the whole file atomically, so that a
running proxy never reads a half-written file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from fakevllm.errors import ConfigError
from fakevllm_adapters.http.access_guard import is_loopback
from fakevllm_adapters.protocol.keys import AppKey, add_key, parse_key_file, revoke_key
from fakevllm_runtime.path_access import unusable_message


def console_lacks_key_file(key_file: Path | None, host: str) -> bool:
    """Return True if a console that listens on `host` must not start without a key file, and has
    none. Other machines can reach it, and its pages show all texts."""
    return key_file is None and not is_loopback(host)


class KeyFile:
    """A file of API keys. Every method raises ConfigError if the file cannot be read or written, or
    if the file's content is not valid."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()

    def entries(self) -> list[AppKey]:
        """Return the entries of the file, one per API key."""
        with self._as_config_errors():
            return parse_key_file(self._read())

    def add(self, key: AppKey) -> None:
        """Add an API key to this file of keys. Raises ConfigError if another valid key has the same
        name."""
        with self._as_config_errors():
            text = self._read()
            entries = parse_key_file(text)
            if any(entry.name == key.name and entry.revoked is None for entry in entries):
                raise ConfigError(
                    f"{key.name} has a key already: choose another name, or revoke that key with "
                    f"`fakevllm keys revoke {key.name} --key-file {self.path}`."
                )
            self._write(add_key(text, key))

    def revoke(self, name: str, when: str) -> None:
        """Mark the valid key with this name as revoked. `when` is the date of the revocation as
        text. Raises ConfigError if no valid key has this name."""
        with self._as_config_errors():
            text = self._read()
            try:
                self._write(revoke_key(text, name, when))
            except LookupError:
                raise ConfigError(self._no_such_key(name, parse_key_file(text))) from None

    def _no_such_key(self, name: str, keys: list[AppKey]) -> str:
        names = [key.name for key in keys if key.name is not None and key.revoked is None]
        others = f"its named keys are {', '.join(names)}" if names else "it has no named key"
        return (
            f"{name} has no key in {self.path}: {others}. "
            "To revoke a key in plain text, delete its line."
        )

    def _read(self) -> str:
        """Return the file's text, or "" if the file does not exist yet."""
        try:
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _write(self, text: str) -> None:
        path = self.path.resolve()  # replace the target of a link, not the link
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # mkstemp creates the file with mode 0600.
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise

    @contextlib.contextmanager
    def _as_config_errors(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            message = unusable_message(self.path, error, "name another one with --key-file")
            raise ConfigError(f"The key file {message}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"The key file {self.path} is not UTF-8 text.") from None
        except ValueError as error:
            raise ConfigError(f"The key file {self.path}: {error}.") from None
