"""Encode numbers for JSON: arrays as base64, and NaN and infinities as strings.

This module does no I/O.
"""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence


def jsonable_numbers(numbers: Mapping[str, float]) -> dict[str, float | str]:
    """Return the dict with NaN and infinities replaced by their names, because JSON has no such
    numbers.

    Python's `float()` converts these names back to numbers.

    >>> jsonable_numbers({"loss": math.nan, "grad_norm": -math.inf, "lr": 0.5})
    {'loss': 'NaN', 'grad_norm': '-Infinity', 'lr': 0.5}
    """
    return {name: jsonable_number(value) for name, value in numbers.items()}


def jsonable_number(value: float) -> float | str:
    """Return `value` if it is finite, else the text `NaN`, `Infinity` or `-Infinity`."""
    if math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def pack_ids(ids: Sequence[int]) -> str:
    """Encode token ids as base64 of int32 in the machine's byte order (little-endian on the usual
    CPUs).

    >>> unpack_ids(pack_ids([1, 2, 300]))
    [1, 2, 300]
    """
    return base64.b64encode(id_bytes(ids)).decode()


def id_bytes(ids: Sequence[int]) -> bytes:
    """Return token ids as int32 in the machine's byte order (little-endian on the usual CPUs).

    >>> id_bytes([1, 2])
    b'\\x01\\x00\\x00\\x00\\x02\\x00\\x00\\x00'
    """
    if isinstance(ids, array) and ids.typecode == "i":
        return ids.tobytes()
    return array("i", ids).tobytes()


def unpack_ids(text: str) -> list[int]:
    """Return the token ids that `pack_ids` encoded.

    Raises ValueError if the text does not decode to whole int32 numbers.
    """
    values = array("i")
    values.frombytes(base64.b64decode(text))
    return values.tolist()


def pack_floats(values: Sequence[float]) -> str:
    """Encode numbers as base64 of float32 in the machine's byte order (little-endian on the usual
    CPUs)."""
    return base64.b64encode(array("f", values).tobytes()).decode()


def unpack_floats(text: str) -> list[float]:
    """Return the numbers that `pack_floats` encoded.

    Raises ValueError if the text does not decode to whole float32 numbers.
    """
    values = array("f")
    values.frombytes(base64.b64decode(text))
    return values.tolist()
