"""Draw the held-out rows of an evaluation of the release gate. This module does no I/O. The
evaluation's id seeds the draws, so they can be repeated.

Each draw chooses a row of the held-out file, uniformly at random and with replacement. The
difference between the two versions on a drawn row therefore has the same expectation in each draw:
the mean difference over the whole file. This expectation does not depend on the rows that were
drawn before. The gate's confidence sequence needs this property. (Without replacement, the
expectation would depend on the rows that are left in the file.)
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Draw:
    """One held-out dataset row that is drawn for an evaluation."""

    row: int
    """Position of the row in the file, from 0."""
    occurrence: int
    """How often earlier draws took the same row."""


class HeldOutDraws:
    """The draws of one evaluation, in order. A draw has a held-out dataset row, and the number of
    earlier draws of the same row.

    >>> draws = HeldOutDraws("gate-20", num_rows=3)
    >>> draws.get(0), draws.get(5)
    (Draw(row=0, occurrence=0), Draw(row=2, occurrence=2))
    """

    def __init__(self, eval_id: str, num_rows: int) -> None:
        assert num_rows > 0, "a held-out file has rows"
        self._eval_id = eval_id
        self._num_rows = num_rows
        self._draws: list[Draw] = []
        self._counts: Counter[int] = Counter()

    def get(self, number: int) -> Draw:
        """Return the draw with this number. The draw has the held-out dataset row to evaluate. The
        first draw has the number 0."""
        while len(self._draws) <= number:
            row = self._row(len(self._draws))
            self._draws.append(Draw(row, self._counts[row]))
            self._counts[row] += 1
        return self._draws[number]

    def _row(self, number: int) -> int:
        digest = hashlib.blake2b(f"{self._eval_id} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) * self._num_rows >> 64
