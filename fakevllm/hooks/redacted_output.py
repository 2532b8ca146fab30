"""Redaction of what hooks print. It covers everything that Python writes to stdout and stderr. It
does not cover the output of other programs that a hook has started."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from fakevllm.hooks.results import Json
from fakevllm_adapters.privacy.redactor import OFF, Redactor
from fakevllm_adapters.privacy.settings import PrivacySettings

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

MAX_HELD_BYTES = 2**16
"""Maximum number of bytes that wait for the end of a line or of a private key. Longer output is
redacted in parts."""
_KEY_BEGINS = b"-----BEGIN "
_KEY_ENDS = b"-----END "


class HookOutput:
    """The stdout and stderr of a hook process. At first, hooks write to the process's own streams.
    When `use` is first called with settings, a redacting stream replaces these streams."""

    def __init__(self, stream: TextIO) -> None:
        """Create the output of a hook process. What hooks print is written to `stream`."""
        self._stream = stream
        self._settings: Json = {}
        self._raw: RedactingRaw | None = None
        self._lock = threading.Lock()

    def use(self, settings: Json) -> None:
        """From now on, redact the output of hooks with these settings. {} redacts nothing."""
        with self._lock:
            if settings == self._settings:
                return
            self._settings = settings
            if self._raw is None:
                self._raw = self._install()
            self._raw.redactor = PrivacySettings.model_validate(settings).redactor

    def end(self) -> None:
        """Write everything that hooks have printed so far, including an incomplete last line."""
        with contextlib.suppress(OSError, ValueError):  # a hook may have closed the stream
            sys.stderr.flush()
        if self._raw is not None:
            self._raw.write_held()

    def _install(self) -> RedactingRaw:
        """Replace stdout and stderr by a new redacting stream, also in the log handlers that hooks
        have made already. Return this stream."""
        raw = RedactingRaw(self._stream)
        wrapped = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=self._stream.encoding,
            errors=self._stream.errors,
            line_buffering=True,
        )
        sys.stdout = sys.stderr = wrapped
        for handler in _log_handlers():
            if handler.stream is self._stream:
                handler.setStream(wrapped)
        return raw


class RedactingRaw(io.RawIOBase):
    """A raw stream that redacts what is written to it, and then writes the result to another
    stream. If the last line is incomplete, all data is held until the line is complete. A private
    key is held until its end is written."""

    def __init__(self, inner: TextIO) -> None:
        super().__init__()
        self._inner = inner
        self._held = b""
        self._lock = threading.Lock()
        self.redactor: Redactor = OFF

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._inner.fileno()

    def isatty(self) -> bool:
        return self._inner.isatty()

    def write(self, b: Buffer, /) -> int:
        written = bytes(b)
        with self._lock:
            self._held += written
            end = _end_of_complete(self._held)
            if end == 0 and len(self._held) > MAX_HELD_BYTES:
                end = len(self._held)
            complete, self._held = self._held[:end], self._held[end:]
            self._write(complete)
        return len(written)

    def write_held(self) -> None:
        """Redact and write the data that is held because a line or a private key is incomplete."""
        with self._lock:
            held, self._held = self._held, b""
            self._write(held)

    def _write(self, data: bytes) -> None:
        if data:
            text = data.decode("utf-8", errors="surrogateescape")
            redacted = self.redactor.text(text).encode("utf-8", errors="surrogateescape")
            self._inner.buffer.write(redacted)
            self._inner.buffer.flush()


def _end_of_complete(data: bytes) -> int:
    """Return how many of the first bytes of `data` can be redacted now. Return 0 if the last line
    is incomplete. (`print` writes the text of a line and its line break separately.) The lines of a
    private key are not included if the end of the key is missing."""
    if not data.endswith(b"\n"):
        return 0
    begin = data.rfind(_KEY_BEGINS)
    if begin >= 0 and data.find(_KEY_ENDS, begin) < 0:
        return data.rfind(b"\n", 0, begin) + 1
    return len(data)


def _log_handlers() -> Iterator[logging.StreamHandler[TextIO]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            for handler in logger.handlers:
                if isinstance(handler, logging.StreamHandler):
                    yield handler
