"""Store long contents of rows in an SQLite file. Parts that contents share are stored once.

A content is a request or a prompt. Each turn of a conversation repeats the content of the previous
turn.

A content is stored as a list of slices of pieces, `[[piece, start, length], …]`. If a new content
shares its beginning or its end with an earlier content, the new list reuses the earlier content's
slices for these parts. Only the bytes between the beginning and the end are stored, as a new piece.
So each turn stores only the bytes that the turn adds. Contents are compared as bytes, so this works
for every format of requests.

The pieces are rows of the table `pieces (piece_id, data)`.

`ContentStore` belongs to the thread that writes the file. The store keeps recent contents in
memory, so it can compare a new content with them without reading the file.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import orjson
from sqlalchemy import Connection

MIN_BYTES = 512
"""Contents below this size are stored directly in their row and not as pieces, because each piece
needs some space for itself."""
MIN_SHARED = 256
"""A content that shares fewer bytes with an earlier one is stored whole."""
MAX_SLICES = 200
"""Maximum number of slices of a content. A content that would have more slices is stored whole, as
one new piece. Otherwise the list would become longer and slower to read with each turn."""
MAX_RECENT_BYTES = 64 * 1024 * 1024
"""Maximum size of the recent contents in memory."""
DIGEST_BYTES = 16

_INSERT = "INSERT INTO pieces (data) VALUES (?)"
_PIECE = "SELECT data FROM pieces WHERE piece_id = ?"

_KEY = "contents"

Slice = tuple[int, int, int]
"""A part of a piece: id of the piece, index of the first byte, number of bytes."""


@dataclass(frozen=True, slots=True)
class Content:
    """A long byte string, such as a request or a prompt, and the slices in which it is stored. Each
    slice is a range of a stored piece of bytes. Several contents may use the same piece."""

    data: bytes
    slices: tuple[Slice, ...]

    @property
    def digest(self) -> bytes:
        """Digest of the content's bytes."""
        return digest_of(self.data)

    @property
    def slices_json(self) -> str:
        """The content's slices (ranges of stored pieces) as JSON. A table row stores the content in
        this form."""
        return orjson.dumps(self.slices).decode()

    def followed_by(self, other: Content) -> Content:
        """Return a new content: the bytes of this content, followed by the bytes of `other`."""
        return Content(self.data + other.data, (*self.slices, *other.slices))


def digest_of(data: bytes) -> bytes:
    """Return the digest of a content's bytes. The digest is stored beside the content's slices."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def cut(slices: Sequence[Slice], start: int, length: int) -> list[Slice]:
    """Return the slices of one part of a content: `length` bytes from byte `start` on. A slice is a
    tuple (id of the stored piece, index of the first byte, number of bytes).

    >>> cut([(1, 0, 10), (2, 5, 10)], 8, 5)
    [(1, 8, 2), (2, 5, 3)]
    """
    parts: list[Slice] = []
    for piece, first, size in slices:
        begin, end = max(0, start), min(size, start + length)
        if begin < end:
            parts.append((piece, first + begin, end - begin))
        start -= size
    return parts


def joined(slices: Sequence[Slice]) -> tuple[Slice, ...]:
    """Return the slices, with adjacent slices of one stored piece merged into one slice. A slice is
    a tuple (id of the piece, index of the first byte, number of bytes).

    >>> joined([(1, 0, 4), (1, 4, 2), (2, 0, 1)])
    ((1, 0, 6), (2, 0, 1))
    """
    parts: list[Slice] = []
    for piece, start, size in slices:
        if parts and parts[-1][0] == piece and sum(parts[-1][1:]) == start:
            parts[-1] = (piece, parts[-1][1], parts[-1][2] + size)
        else:
            parts.append((piece, start, size))
    return tuple(parts)


def common_prefix(first: bytes, second: bytes) -> int:
    """Return the number of equal bytes at the beginning of both arguments.

    >>> common_prefix(b"abcd", b"abxd"), common_prefix(b"ab", b"abc")
    (2, 2)
    """
    low, high = 0, min(len(first), len(second))
    while low < high:  # compares whole blocks, because a loop over bytes would be slow
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(first: bytes, second: bytes, limit: int) -> int:
    """Return the number of equal bytes at the end of `first` and `second`, at most `limit`.

    >>> common_suffix(b"abcd", b"xbcd", 4), common_suffix(b"abcd", b"xbcd", 2)
    (3, 2)
    """
    num_first, num_second = len(first), len(second)
    low, high = 0, min(num_first, num_second, limit)
    while low < high:
        middle = (low + high + 1) // 2
        if (
            first[num_first - middle : num_first - low]
            == second[num_second - middle : num_second - low]
        ):
            low = middle
        else:
            high = middle - 1
    return low


def _unchanged(data: bytes) -> bytes:
    return data


class ContentStore:
    """A store for contents (long byte strings, such as prompts). Equal parts of contents are stored
    once.

    A content is a list of slices, and each slice is a range of a stored piece of bytes. Store
    contents only within a `with` block of the method `transaction`.

    `compress` and `decompress` are applied to whole pieces. SQL cannot take a range of a compressed
    piece. Therefore, if `compress` is given, no SQL view may read ranges of pieces.
    """

    def __init__(
        self,
        max_recent_bytes: int = MAX_RECENT_BYTES,
        *,
        compress: Callable[[bytes], bytes] = _unchanged,
        decompress: Callable[[bytes], bytes] = _unchanged,
    ) -> None:
        self._recent: OrderedDict[str, Content] = OrderedDict()
        self._num_bytes = 0
        self._max_recent_bytes = max_recent_bytes
        self._compress = compress
        self._decompress = decompress

    @contextmanager
    def transaction(self) -> Generator[None]:
        """Run the block of a `with` statement, in which contents are stored. If the block raises an
        error, forget the contents that the store keeps in memory. The rollback of the database may
        have removed their pieces."""
        try:
            yield
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Forget the contents that the store keeps in memory. The database does not change."""
        self._recent.clear()
        self._num_bytes = 0

    def find(self, key: str) -> Content | None:
        """Return the content (a long byte string) that this store keeps in memory under `key`.
        Return None if there is none."""
        content = self._recent.get(key)
        if content is not None:
            self._recent.move_to_end(key)
        return content

    def remember(self, key: str, content: Content) -> None:
        """Keep a content in memory under a key, in place of an earlier content with this key. If
        the contents in memory become too large, the least recently used contents are forgotten."""
        old = self._recent.pop(key, None)
        self._num_bytes += len(content.data) - (0 if old is None else len(old.data))
        self._recent[key] = content
        while self._num_bytes > self._max_recent_bytes:
            _, oldest = self._recent.popitem(last=False)
            self._num_bytes -= len(oldest.data)

    def load(self, db: Connection, slices_json: str) -> Content:
        """Read a content (a long byte string) from the database. `slices_json` has its slices
        (ranges of stored pieces) as JSON. Raises ValueError if a piece is missing, and for some
        kinds of damage."""
        slices = [(piece, start, size) for piece, start, size in orjson.loads(slices_json)]
        pieces = {piece: self._read(db, piece) for piece in {piece for piece, _, _ in slices}}
        data = b"".join(pieces[piece][start : start + size] for piece, start, size in slices)
        return Content(data, tuple(slices))

    def _read(self, db: Connection, piece: int) -> bytes:
        row = dbapi_connection(db).execute(_PIECE, (piece,)).fetchone()
        if row is None:
            raise ValueError(f"piece {piece} is missing")
        return self._decompress(row[0])

    def store(self, db: Connection, data: bytes, bases: Sequence[Content]) -> Content:
        """Store `data`, and return it as a Content. `bases` are earlier contents, such as the
        previous turn of a conversation. If `data` shares enough bytes at its beginning and end with
        one of these contents, only the remaining bytes are stored."""
        for base in bases:
            if base.data == data:
                return base
        best: tuple[int, int, Content] | None = None
        for base in bases:
            prefix = common_prefix(base.data, data)
            suffix = common_suffix(base.data, data, min(len(base.data), len(data)) - prefix)
            if best is None or prefix + suffix > best[0] + best[1]:
                best = (prefix, suffix, base)
        slices: tuple[Slice, ...] = ()
        if best is not None and best[0] + best[1] >= MIN_SHARED:
            slices = self._store_rest(db, data, *best)
        if not slices:
            slices = ((self._insert(db, data), 0, len(data)),)
        return Content(data, slices)

    def _store_rest(
        self, db: Connection, data: bytes, prefix: int, suffix: int, base: Content
    ) -> tuple[Slice, ...]:
        """Store only the new bytes of `data`, between its first `prefix` bytes and its last
        `suffix` bytes. `base` has the same first and last bytes. Return the slices of `data`. If
        `data` would have too many slices, store nothing and return ()."""
        head = cut(base.slices, 0, prefix)
        tail = cut(base.slices, len(base.data) - suffix, suffix)
        if len(head) + 1 + len(tail) > MAX_SLICES:
            return ()
        rest = data[prefix : len(data) - suffix]
        middle = [(self._insert(db, rest), 0, len(rest))] if rest else []
        return joined([*head, *middle, *tail])

    def _insert(self, db: Connection, data: bytes) -> int:
        row = (self._compress(data),)
        return cast(int, dbapi_connection(db).execute(_INSERT, row).lastrowid)


def content_store(db: Connection) -> ContentStore:
    """Return the ContentStore of the connection `db`. This connection must be the one that writes
    the SQLite file."""
    info = db.info
    if _KEY not in info:
        info[_KEY] = ContentStore()
    return cast(ContentStore, info[_KEY])


def dbapi_connection(db: Connection) -> sqlite3.Connection:
    """Return the sqlite3.Connection that is wrapped by SQLAlchemy's connection `db`."""
    return cast(sqlite3.Connection, db.connection.dbapi_connection)
