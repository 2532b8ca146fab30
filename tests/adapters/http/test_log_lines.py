"""A log of one JSON object a line, whatever is logged."""

from __future__ import annotations

import doctest
import json
import logging
from typing import Any

from fakevllm_adapters.http import log_lines
from fakevllm_adapters.http.log_lines import JsonLines


def told(message: str, *values: object, **fields: Any) -> dict[str, Any]:
    record = logging.getLogger("some").makeRecord(
        "some", logging.INFO, "file.py", 1, message, values, None, extra=fields or None
    )
    return lines_of(record)


def lines_of(record: logging.LogRecord) -> dict[str, Any]:
    line = JsonLines().format(record)
    assert "\n" not in line
    return json.loads(line)


def test_the_example_in_its_docstring_holds() -> None:
    assert doctest.testmod(log_lines).failed == 0


def test_a_line_has_time_level_logger_message_and_the_fields() -> None:
    line = told("step %d", 3, step=3, group="g-1")
    time = line.pop("time")
    assert time.endswith("Z") and "T" in time
    assert line == {
        "level": "INFO",
        "logger": "some",
        "message": "step 3",
        "step": 3,
        "group": "g-1",
    }


def test_several_lines_and_odd_letters_stay_one_line() -> None:
    assert told("one\ntwo ü\u2028")["message"] == "one\ntwo ü\u2028"


def test_a_field_never_takes_the_place_of_the_message() -> None:
    line = told("said", level="low", time=1)
    assert (line["level"], line["message"]) == ("INFO", "said")
    assert line["time"] != 1


def test_a_field_that_json_does_not_know_is_told_as_text() -> None:
    assert told("x", at=b"raw")["at"] == "b'raw'"


def test_an_error_comes_with_its_traceback() -> None:
    try:
        raise ValueError("why")
    except ValueError as error:
        record = logging.makeLogRecord(
            {"msg": "it failed", "exc_info": (type(error), error, error.__traceback__)}
        )
    line = lines_of(record)
    assert line["message"] == "it failed"
    assert line["exception"].splitlines()[-1] == "ValueError: why"
