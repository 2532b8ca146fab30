"""Numbers with their nouns, for messages."""

from __future__ import annotations


def counted(num: int, noun: str, rest: str = "", rest_of_one: str | None = None) -> str:
    """Return a number with its noun, and optionally the rest of the sentence. The rest may differ
    between singular and plural.

    >>> counted(1, "row"), counted(2, "row")
    ('1 row', '2 rows')
    >>> counted(1, "row", "have no reward", "has no reward")
    '1 row has no reward'
    """
    if num == 1:
        rest = rest if rest_of_one is None else rest_of_one
    return " ".join(filter(None, [f"{num} {noun}" if num == 1 else f"{num} {noun}s", rest]))
