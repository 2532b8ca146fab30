"""The file that keeps the API keys of apps: written so that a proxy reading it at any moment finds
it whole."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.keys import AppKey, add_key, parse_key_file, revoke_key

_MODE = 0o600


class KeyFile:
    """Every method raises ConfigError with what to do."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser()

    def entries(self) -> list[AppKey]:
        with self._mistakes():
            return parse_key_file(self._read())

    def add(self, key: AppKey) -> None:
        with self._mistakes():
            known = self._read()
            if any(
                have.name == key.name and have.revoked is None for have in parse_key_file(known)
            ):
                raise ConfigError(
                    f"{key.name} has a key already: choose another name, or end that one with "
                    f"`fakevllm keys revoke {key.name} --key-file {self.path}`."
                )
            self._write(add_key(known, key))

    def revoke(self, name: str, when: str) -> None:
        with self._mistakes():
            known = self._read()
            try:
                self._write(revoke_key(known, name, when))
            except LookupError:
                raise ConfigError(self._nobody(name, parse_key_file(known))) from None

    def _nobody(self, name: str, keys: list[AppKey]) -> str:
        names = [key.name for key in keys if key.name is not None and key.revoked is None]
        have = f"keys have {', '.join(names)}" if names else "no app has one"
        return (
            f"{name} has no key in {self.path}: {have}. "
            "A key in plain text is ended by deleting its line."
        )

    def _read(self) -> str:
        """ "" where there is no file yet."""
        try:
            return self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _write(self, text: str) -> None:
        path = self.path.resolve()  # a link stays one
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # made with 0600
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
    def _mistakes(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(f"The key file {self.path}: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise ConfigError(f"The key file {self.path} is not UTF-8 text.") from None
        except ValueError as error:
            raise ConfigError(f"The key file {self.path}: {error}.") from None
