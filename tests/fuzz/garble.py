"""Garbled bytes: noise, and valid bodies with something wrong in them."""

from __future__ import annotations

import copy
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import orjson
from hypothesis import strategies as st

DEEP = 100_000
ODD_VALUES: list[bytes] = [
    *(b"null", b"true", b"0", b"-1", b"1.5", b'""', b'"x"', b"[]", b"{}", b"[[]]", b"[null]"),
    *(b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0.0", b"1e-400", b"00", b"0x10"),
    *(b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"7" * 5000),
    *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\\u0000"', b'"\xff\xfe"', b'"\xed\xa0\x80"'),
    *(b'"\\ud83d\\ude00"', b'"' + b"a" * 70_000 + b'"', b'"\n"', b"'x'", b"undefined"),
    *(b"[" * 100 + b"]" * 100, b'{"a":' * 60 + b"1" + b"}" * 60, b"[" * DEEP, b'{"a":' * DEEP),
    *(b"[" * 240 + b"]" * 240, b"[" * 600 + b"]" * 600, b"[" * 2000 + b"]" * 2000),
    b"/* no */ 1",
]
"""Unusual JSON texts, and texts that only look like JSON."""
HOLE = b'"@here@"'
"""Placeholder of a value that is to be replaced."""


def holes(body: Any) -> list[bytes]:
    """Return the body once for each of its values, with a placeholder for that value."""
    return [orjson.dumps(_with_hole(body, path)) for path in _paths(body)]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    keys: Any = cast(Any, value).keys() if isinstance(value, dict) else ()
    keys = range(len(cast(list[Any], value))) if isinstance(value, list) else keys
    for key in keys:
        yield from _paths(value[key], (*path, key))


def _with_hole(body: Any, path: tuple[Any, ...]) -> Any:
    hole = orjson.loads(HOLE)
    if not path:
        return hole
    with_hole = parent = copy.deepcopy(body)
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = hole
    return with_hole


def _fill_hole(with_hole: bytes, value: bytes) -> bytes:
    return with_hole.replace(HOLE, value)


def _flip_bit(raw: bytes, at: int) -> bytes:
    at %= max(len(raw), 1)
    return raw[:at] + bytes(byte ^ (1 << at % 8) for byte in raw[at : at + 1]) + raw[at + 1 :]


def _repeat_piece(raw: bytes, at: int) -> bytes:
    """Insert a copy of one piece of the bytes elsewhere."""
    at %= max(len(raw), 1)
    return raw[:at] + raw[at // 2 : at // 2 + 17] + raw[at:]


def _repeat_keys(raw: bytes, at: int) -> bytes:
    """If the bytes are a JSON object, write each of its keys twice. Otherwise repeat the bytes."""
    is_object = raw.startswith(b"{") and len(raw) > 2
    return raw[:-1] + b"," + raw[1:] if is_object else raw + raw


def _encoded_as(name: str) -> Callable[[bytes, int], bytes]:
    return lambda raw, at: raw.decode("utf-8", "replace").encode(name)


CHANGES: list[Callable[[bytes, int], bytes]] = [
    lambda raw, at: raw[: at % (len(raw) + 1)],
    lambda raw, at: raw[at % (len(raw) + 1) :],
    _flip_bit,
    _repeat_piece,
    _repeat_keys,
    _encoded_as("utf-8-sig"),
    _encoded_as("utf-16"),
    _encoded_as("utf-32-be"),
    lambda raw, at: gzip.compress(raw, mtime=0),
    lambda raw, at: zlib.compress(raw),
    lambda raw, at: raw + b"\0" * (at % 5),
    lambda raw, at: b" " * (at % 50) + raw + b"\n" * (at % 7),
    lambda raw, at: raw.replace(b":", b": NaN, ", 1),
]
Change = tuple[Callable[[bytes, int], bytes], int]
SOME_CHANGES: st.SearchStrategy[list[Change]] = st.lists(
    st.tuples(st.sampled_from(CHANGES), st.integers(0, 4000)), min_size=1, max_size=3
)


def apply_changes(raw: bytes, changes: Sequence[Change]) -> bytes:
    """Return the bytes after all changes."""
    for change, at in changes:
        raw = change(raw, at)
    return raw


def garbled(*valid: Any) -> st.SearchStrategy[bytes]:
    """Return a strategy for garbled bytes: noise, and valid bodies with an odd value or with
    changed bytes."""
    with_holes = [raw for body in valid for raw in holes(body)]
    odd = st.builds(_fill_hole, st.sampled_from(with_holes), st.sampled_from(ODD_VALUES))
    whole = st.sampled_from([orjson.dumps(body) for body in valid])
    noise = st.binary(max_size=80) | st.sampled_from(ODD_VALUES)
    return st.one_of(odd, odd, st.builds(apply_changes, whole | odd, SOME_CHANGES), noise)
