"""Bytes as no honest program writes them: noise, and valid bodies with something wrong in them."""

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
"""JSON texts, and what only looks like one."""
HOLE = b'"@here@"'


def holes(body: Any) -> list[bytes]:
    """The body once for each of its values, with that value left open."""
    return [orjson.dumps(_opened(body, path)) for path in _paths(body)]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    keys: Any = cast(Any, value).keys() if isinstance(value, dict) else ()
    keys = range(len(cast(list[Any], value))) if isinstance(value, list) else keys
    for key in keys:
        yield from _paths(value[key], (*path, key))


def _opened(body: Any, path: tuple[Any, ...]) -> Any:
    hole = orjson.loads(HOLE)
    if not path:
        return hole
    opened = at = copy.deepcopy(body)
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = hole
    return opened


def _filled(opened: bytes, value: bytes) -> bytes:
    return opened.replace(HOLE, value)


def _flipped(raw: bytes, at: int) -> bytes:
    at %= max(len(raw), 1)
    return raw[:at] + bytes(byte ^ (1 << at % 8) for byte in raw[at : at + 1]) + raw[at + 1 :]


def _spliced(raw: bytes, at: int) -> bytes:
    """A piece of it once more, somewhere else."""
    at %= max(len(raw), 1)
    return raw[:at] + raw[at // 2 : at // 2 + 17] + raw[at:]


def _twice(raw: bytes, at: int) -> bytes:
    """Every key twice, where it is an object."""
    is_object = raw.startswith(b"{") and len(raw) > 2
    return raw[:-1] + b"," + raw[1:] if is_object else raw + raw


def _in_code(name: str) -> Callable[[bytes, int], bytes]:
    return lambda raw, at: raw.decode("utf-8", "replace").encode(name)


CHANGES: list[Callable[[bytes, int], bytes]] = [
    lambda raw, at: raw[: at % (len(raw) + 1)],
    lambda raw, at: raw[at % (len(raw) + 1) :],
    _flipped,
    _spliced,
    _twice,
    _in_code("utf-8-sig"),
    _in_code("utf-16"),
    _in_code("utf-32-be"),
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


def changed(raw: bytes, changes: Sequence[Change]) -> bytes:
    for change, at in changes:
        raw = change(raw, at)
    return raw


def garbled(*valid: Any) -> st.SearchStrategy[bytes]:
    """Noise, or one of the valid bodies with an odd value in it, or its bytes changed."""
    opened = [each for body in valid for each in holes(body)]
    odd = st.builds(_filled, st.sampled_from(opened), st.sampled_from(ODD_VALUES))
    whole = st.sampled_from([orjson.dumps(body) for body in valid])
    noise = st.binary(max_size=80) | st.sampled_from(ODD_VALUES)
    return st.one_of(odd, odd, st.builds(changed, whole | odd, SOME_CHANGES), noise)
