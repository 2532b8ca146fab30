"""Numbers as they go through JSON: many of them packed, and those JSON has not by name. Pure."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence


def told_numbers(numbers: Mapping[str, float]) -> dict[str, float | str]:
    """For JSON, which has no number that is not finite: those are told by name. `float` reads both.

    >>> told_numbers({"loss": math.nan, "grad_norm": -math.inf, "lr": 0.5})
    {'loss': 'NaN', 'grad_norm': '-Infinity', 'lr': 0.5}
    """
    return {name: told_number(value) for name, value in numbers.items()}


def told_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def pack_ids(ids: Sequence[int]) -> str:
    """
    >>> unpack_ids(pack_ids([1, 2, 300]))
    [1, 2, 300]
    """
    return base64.b64encode(array("i", ids).tobytes()).decode()


def unpack_ids(text: str) -> list[int]:
    values = array("i")
    values.frombytes(base64.b64decode(text))
    return values.tolist()


def pack_floats(values: Sequence[float]) -> str:
    return base64.b64encode(array("f", values).tobytes()).decode()


def unpack_floats(text: str) -> list[float]:
    values = array("f")
    values.frombytes(base64.b64decode(text))
    return values.tolist()
