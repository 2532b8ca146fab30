"""Groups whose rows in the ledger cannot be read. A command over many groups skips such a group,
and lists it."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from sqlalchemy.exc import DatabaseError

READ_ERRORS = (DatabaseError, sqlite3.Error, ValueError, TypeError, KeyError, AttributeError)
"""Exceptions that reading a group raises if its rows are damaged."""


@dataclass(frozen=True, slots=True)
class BrokenGroup:
    """A group whose rows in the ledger cannot be read."""

    group_id: str
    error: str

    @staticmethod
    def of(group_id: str, error: Exception) -> BrokenGroup:
        """Return a BrokenGroup whose field `error` has the type and the first line of `error`.

        >>> BrokenGroup.of("g1", ValueError("no JSON")).error
        'ValueError: no JSON'
        """
        cause = str(getattr(error, "orig", None) or error).partition("\n")[0]
        return BrokenGroup(group_id, f"{type(error).__name__}: {cause}")
