"""Logs of one JSON object per line."""

from __future__ import annotations

import doctest
import json
import logging
from typing import Any

from fakevllm_adapters.http import log_format
from fakevllm_adapters.http.log_format import JsonLines


def logged(message: str, *values: object, **fields: Any) -> dict[str, Any]:
    record = logging.getLogger("some").makeRecord(
        "some", logging.INFO, "file.py", 1, message, values, None, extra=fields or None
    )
    return parsed_line(record)


def parsed_line(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonLines().format(record)
    assert "\n" not in line
    return json.loads(line)


def test_the_example_in_the_docstring_holds() -> None:
    assert doctest.testmod(log_format).failed == 0


def test_a_line_has_time_level_logger_message_and_the_fields() -> None:
    line = logged("step %d", 3, step=3, group="g-1")
    time = line.pop("time")
    assert time.endswith("Z") and "T" in time
    assert line == {
        "level": "INFO",
        "logger": "some",
        "message": "step 3",
        "step": 3,
        "group": "g-1",
    }


def test_a_message_with_line_breaks_stays_in_one_line() -> None:
    assert logged("one\ntwo ü\u2028")["message"] == "one\ntwo ü\u2028"


def test_an_extra_field_does_not_replace_level_or_time() -> None:
    line = logged("text", level="low", time=1)
    assert (line["level"], line["message"]) == ("INFO", "text")
    assert line["time"] != 1


def test_an_extra_field_that_is_not_json_is_logged_as_text() -> None:
    assert logged("x", at=b"raw")["at"] == "b'raw'"


def test_an_error_is_logged_with_its_traceback() -> None:
    try:
        raise ValueError("why")
    except ValueError as error:
        record = logging.makeLogRecord(
            {"msg": "it failed", "exc_info": (type(error), error, error.__traceback__)}
        )
    line = parsed_line(record)
    assert line["message"] == "it failed"
    assert line["exception"].splitlines()[-1] == "ValueError: why"
