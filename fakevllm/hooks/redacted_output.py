"""Redaction of what hooks print. It covers everything that Python writes to stdout and stderr, and
not what other programs write that a hook has started."""

from __future__ import annotations

import io
import threading
from typing import TextIO

from fakevllm.hooks.results import Json
from fakevllm_adapters.privacy.redactor import OFF, Redactor
from fakevllm_adapters.privacy.settings import PrivacySettings


class RedactedOutput(io.TextIOBase):
    """A text stream that redacts each line before it writes the line to another stream."""

    def __init__(self, inner: TextIO) -> None:
        super().__init__()
        self._inner = inner
        self._settings: Json = {}
        self._redactor: Redactor = OFF
        self._line = ""
        self._lock = threading.Lock()

    def use(self, settings: Json) -> None:
        """Redact with these settings from now on; {} redacts nothing."""
        if settings != self._settings:
            self._settings = settings
            self._redactor = PrivacySettings.model_validate(settings).redactor

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._inner.fileno()

    def isatty(self) -> bool:
        return self._inner.isatty()

    def write(self, text: str) -> int:
        if not self._redactor and not self._line:
            return self._inner.write(text)
        with self._lock:
            *lines, self._line = (self._line + text).splitlines(keepends=True) or [""]
            if self._line.endswith("\n"):
                lines, self._line = [*lines, self._line], ""
            self._inner.write("".join(map(self._redactor.text, lines)))
        return len(text)

    def flush(self) -> None:
        self._inner.flush()

    def end(self) -> None:
        """Write an incomplete last line."""
        if self._line:
            self.write("\n")
        self.flush()
