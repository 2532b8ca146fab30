"""Fields of pydantic models as rows of a table: type, default, unit and description."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs.reference_pages import docstrings
from docs.reference_pages.markdown import code, prose

HEAD = ("type", "default", "unit", "meaning")
"""Head of the columns of `FieldRow.cells`."""
_PLAIN = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true or false",
    Path: "path",
    Any: "any value",
}
_UNITS = {
    "_s": "seconds",
    "_days": "days",
    "_mb": "MB",
    "_bytes": "bytes",
    "_chars": "characters",
    "_tokens": "tokens",
    "_len": "tokens",
    "_length": "tokens",
    "_in_one_turn": "tokens",
}
"""Unit of a setting by the end of its name."""
_MIB = "MiB"


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One setting, with its texts not yet escaped."""

    name: str
    type_text: str
    default: str
    unit: str
    meaning: str

    @property
    def cells(self) -> list[str]:
        """The cells of the columns `HEAD`."""
        return [
            self.type_text,
            code(self.default) if self.default else "",
            self.unit,
            prose(self.meaning),
        ]


def rows_of(model: type[BaseModel], meanings: Mapping[str, str] | None = None) -> list[FieldRow]:
    """Return one row per field of a model, in the order of their definition.

    `meanings` has descriptions for fields that have no docstring. Raises ValueError if a field has
    no description at all.
    """
    described = dict(meanings or {}) | docstrings.of_class(model)
    rows: list[FieldRow] = []
    for name, field in model.model_fields.items():
        if name not in described:
            raise ValueError(f"{model.__name__}.{name} has no docstring: write one below the field")
        meaning = described[name]
        rows.append(
            FieldRow(name, _type_of(field), _default_of(field), _unit(name, meaning), meaning)
        )
    return rows


def _type_of(field: FieldInfo) -> str:
    base = type_text(field.annotation)
    limits = range_text(field.metadata)
    return f"{base}, {limits}" if limits else base


def type_text(annotation: Any) -> str:
    """Return the name of a type for a reader who writes TOML or YAML.

    >>> type_text(tuple[int, ...]), type_text(Literal["a", "b"] | None), type_text(dict[str, int])
    ('list (integer)', '`"a"` or `"b"`', 'table (name: integer)')
    """
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return _joined([code(json.dumps(value)) for value in arguments])
    if origin in (Union, types.UnionType):
        return _joined([type_text(one) for one in arguments if one is not types.NoneType])
    if origin is dict:
        return f"table (name: {type_text(arguments[1])})"
    if origin is tuple and arguments[-1] is not Ellipsis:
        return f"list ({', '.join(type_text(one) for one in arguments)})"
    if origin in (tuple, list):
        return f"list ({type_text(arguments[0])})"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _joined([code(member) for member in annotation])
    return _PLAIN[annotation]


def _joined(parts: list[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} or {last}" if first else last


def range_text(metadata: Sequence[Any]) -> str:
    """Return the limits of a number.

    >>> range_text([Ge(0), Le(1)]), range_text([Gt(0), Lt(0.5)]), range_text([Ge(1)])
    ('0 to 1', 'above 0, below 0.5', '1 or more')
    """
    limits = {
        kind.__name__.lower(): getattr(one, kind.__name__.lower())
        for one in metadata
        for kind in (Ge, Gt, Le, Lt)
        if isinstance(one, kind)
    }
    if {"ge", "le"} <= limits.keys():
        return f"{limits['ge']:g} to {limits['le']:g}"
    texts = {"ge": "{:g} or more", "gt": "above {:g}", "le": "at most {:g}", "lt": "below {:g}"}
    return ", ".join(text.format(limits[kind]) for kind, text in texts.items() if kind in limits)


def _default_of(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, BaseModel):  # the section has a table of its own
        return ""
    return json.dumps(value, ensure_ascii=False, default=str)


def _unit(name: str, meaning: str) -> str:
    unit = next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")
    return _MIB if unit == _UNITS["_mb"] and _MIB in meaning else unit
