"""The log format of proxy and server: either text lines, or one JSON object per line."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Literal

from fakevllm_adapters.privacy.redactor import Redactor

LogFormat = Literal["human", "json"]
HUMAN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"])
"""Attributes of a log record that are not `extra` fields. These are the attributes that every
record has, and uvicorn's coloured copy of its message."""


class JsonLines(logging.Formatter):
    """A log formatter that writes each record as one line with a JSON object.

    The object has the record's time, level, logger and message. It also has the record's `extra`
    fields, and the traceback of an exception.

    >>> record = logging.makeLogRecord({"name": "x", "levelname": "INFO", "step": 3})
    >>> record.created = 0.5
    >>> print(JsonLines().format(record))
    {"time": "1970-01-01T00:00:00.500Z", "level": "INFO", "logger": "x", "message": "", "step": 3}
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        extra = {name: value for name, value in vars(record).items() if name not in _OWN}
        line = line | {name: value for name, value in extra.items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def set_up_logging(kind: LogFormat) -> None:
    """Set up the logging of the process. Call this function once, when the process starts.

    Uvicorn's logs get the same format unless uvicorn is given its own log configuration.
    """
    logging.basicConfig(level=logging.INFO, format=HUMAN)
    if kind == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
        logging.captureWarnings(True)


class RedactedLines(logging.Formatter):
    """A log formatter that redacts the lines of another formatter."""

    def __init__(self, inner: logging.Formatter, redactor: Callable[[], Redactor]) -> None:
        super().__init__()
        self._inner = inner
        self._redactor = redactor

    def format(self, record: logging.LogRecord) -> str:
        return self._redactor().text(self._inner.format(record))


def redact_logs(redactor: Callable[[], Redactor]) -> None:
    """Redact all further lines of the process's log. The function `redactor` is called for each
    line, and returns the redactor to use. Call `redact_logs` after `set_up_logging`."""
    for handler in logging.getLogger().handlers:
        inner = handler.formatter or logging.Formatter(HUMAN)
        handler.setFormatter(RedactedLines(inner, redactor))


def _time(seconds: float) -> str:
    whole, part = divmod(seconds, 1)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int(part * 1000):03}Z"
