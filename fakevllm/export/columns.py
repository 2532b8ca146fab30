"""The types of the columns of a dataset file. This module does no I/O."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any


class ColumnType(StrEnum):
    """The type of a column of a dataset file. A column of any type may contain None."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    FLAG = "flag"
    OBJECT = "object"
    """A JSON object whose keys differ from row to row."""
    OBJECTS = "objects"
    """A list of JSON objects whose keys differ from object to object."""


Columns = dict[str, ColumnType]
"""The columns of a file, by name, in their order."""
_PYTHON_TYPES: dict[ColumnType, type] = {
    ColumnType.TEXT: str,
    ColumnType.INTEGER: int,
    ColumnType.FLAG: bool,
    ColumnType.OBJECT: dict,
    ColumnType.OBJECTS: list,
}


def typed_row(row: dict[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the row with its values in the order of the columns, each value in the type of its
    column.

    Raises TypeError for a value of another type. The check is needed because SQLite stores values
    of any type in a column. One such value would make the whole dataset file unreadable.

    >>> typed_row({"reward": 1}, {"reward": ColumnType.NUMBER})
    {'reward': 1.0}
    """
    return {name: _typed(row[name], name, column_type) for name, column_type in columns.items()}


def _typed(value: Any, name: str, column_type: ColumnType) -> Any:
    if value is None:
        return None
    if column_type is ColumnType.NUMBER:
        return number(name, value)
    if not isinstance(value, _PYTHON_TYPES[column_type]):
        raise TypeError(f"{name} is {type(value).__name__}, and not {column_type}")
    return value


def number(name: str, value: object) -> float | None:
    """Return `value` as a number, or None for None. Raises TypeError for a value that is not a
    number. Raises TypeError as well for NaN and infinity, because JSON cannot express them.

    >>> number("reward", 1)
    1.0
    """
    if value is None:
        return None
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {type(value).__name__}, and not {ColumnType.NUMBER}")
    if not math.isfinite(value):
        raise TypeError(f"{name} is {value}, and not a finite number")
    return float(value)
