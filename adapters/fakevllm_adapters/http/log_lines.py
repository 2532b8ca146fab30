"""What both programs' logs look like: lines for people, or one JSON object a line for programs."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

LogFormat = Literal["human", "json"]
HUMAN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_OWN = frozenset([*vars(logging.makeLogRecord({})), "message", "asctime", "color_message"])
"""What every record has, and uvicorn's copy of its message for terminals."""


class JsonLines(logging.Formatter):
    """Time, level, logger and message; then what was given as `extra`; then a traceback.

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


def set_up(kind: LogFormat) -> None:
    """The process's logging, once. Uvicorn's own goes the same way where it is given no
    configuration of its own."""
    logging.basicConfig(level=logging.INFO, format=HUMAN)
    if kind == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(JsonLines())
        logging.captureWarnings(True)


def _time(seconds: float) -> str:
    whole, part = divmod(seconds, 1)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{int(part * 1000):03}Z"
