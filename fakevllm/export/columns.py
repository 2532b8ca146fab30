"""The types of the columns of a dataset file. This module does no I/O."""

from __future__ import annotations

from enum import StrEnum


class ColumnType(StrEnum):
    """The type of a column. A value may be None."""

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
