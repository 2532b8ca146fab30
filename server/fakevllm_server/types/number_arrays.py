"""Arrays of token ids and of floats. They are used in place of lists of numbers.

The calls that wait for a step have millions of tokens. In a list, each token is an object. The
garbage collection and the release of so many objects each hold the interpreter's lock (GIL) for
hundreds of milliseconds. The server's event loop stands still meanwhile. An array is one block of
memory and does not have this problem. The module does no I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    _Ids = array[int]
    _Floats = array[float]
else:  # Python 3.11 has no array[int]
    _Ids = _Floats = array


class _EqualsLists:
    """The base class of the arrays. An array is equal to a list or tuple with the same numbers, and
    its `repr` is that of the list."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        own = cast("array[Any]", self)
        if isinstance(other, list | tuple):
            return own.tolist() == list(cast("Iterable[Any]", other))
        return array.__eq__(own, other)  # pyright: ignore[reportUnknownMemberType]

    def __ne__(self, other: object) -> bool:
        # Without this method, `!=` would be that of `array`, which differs from every list.
        return not self == other

    def __repr__(self) -> str:
        return repr(cast("array[Any]", self).tolist())


class IdArray(_EqualsLists, _Ids):
    """An array of 32-bit integers that equals a list with the same numbers.

    >>> id_array([1, 2]) == [1, 2]
    True
    """

    __slots__ = ()


class FloatArray(_EqualsLists, _Floats):
    """An array of 64-bit floats that equals a list with the same numbers.

    >>> float_array([0.5])
    [0.5]
    """

    __slots__ = ()


def id_array(ids: Iterable[int]) -> IdArray:
    """Return the ids as an array. If `ids` is an IdArray already, return `ids` itself."""
    return ids if isinstance(ids, IdArray) else cast(IdArray, IdArray("i", ids))


def ids_from_bytes(raw: bytes) -> IdArray:
    """Return the ids in `raw`, which contains int32 numbers. Raises ValueError if a number is
    incomplete or negative.

    >>> ids_from_bytes(bytes([1, 0, 0, 0]))
    [1]
    """
    if not raw[3::4].isascii():  # the sign bits
        raise ValueError("an id is negative")
    ids = id_array(())
    ids.frombytes(raw)
    return ids


def float_array(values: Iterable[float]) -> FloatArray:
    """Return the values as an array. If `values` is a FloatArray already, return `values`
    itself."""
    return values if isinstance(values, FloatArray) else cast(FloatArray, FloatArray("d", values))


def repeated(value: float, times: int) -> FloatArray:
    """Return an array with `times` copies of the number `value`."""
    return cast(FloatArray, FloatArray("d", array("d", [value]) * times))
