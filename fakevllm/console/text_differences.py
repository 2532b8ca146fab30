"""Mark the words in which answers differ from a reference answer.

The words that two texts have in common are their longest common subsequence. Whether two words
are equal is computed for all words of the reference at once, as the bits of one integer (Crochemore
et al. 2001, Hyyrö 2004). So the time depends on the number of words alone. `difflib` needs a minute
for some texts of a thousand words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_COMPARISONS = 100_000_000
"""Maximum number of pairs of words that are compared for one group, such as two texts of 10,000
words each. They take about a tenth of a second, and memory of one bit per pair."""
_WORD = re.compile(r"(\s*)(\w+|[^\w\s])")


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a text, and whether the part is missing in the reference."""

    text: str
    is_different: bool = False


def mark_differences(texts: Sequence[str], reference: str) -> list[list[TextPart]]:
    """Return each text, split into parts. A part is marked if `reference` does not have its words
    at this place. White space is not compared. Nothing is marked in texts that are too long to be
    compared.

    >>> [part.text for part in mark_differences(["It is 42."], "It is 41.")[0] if part.is_different]
    ['42']
    """
    reference_words = [word for _, word in _WORD.findall(reference)]
    num_left = MAX_COMPARISONS
    marked: list[list[TextPart]] = []
    for text in texts:
        words = [] if text == reference else _WORD.findall(text)
        num = len(words) * len(reference_words)
        if not words or num > num_left:
            marked.append([TextPart(text)])
            continue
        num_left -= num
        is_common = _common_words(reference_words, [word for _, word in words])
        marked.append(list(_parts(text, words, is_common)))
    return marked


def _common_words(reference: Sequence[str], words: Sequence[str]) -> list[bool]:
    """Return for each word whether it is in a longest common subsequence with the reference."""
    places: dict[str, int] = {}
    for index, word in enumerate(reference):
        places[word] = places.get(word, 0) | 1 << index
    # A bit that is 0 in a row is a place of the reference at which the common subsequence grows.
    row = (1 << len(reference)) - 1
    all_places = row
    rows = [row]
    for word in words:
        matches = row & places.get(word, 0)
        row = ((row + matches) | (row - matches)) & all_places
        rows.append(row)
    return _trace(rows, len(reference))


def _trace(rows: Sequence[int], num_places: int) -> list[bool]:
    """Return for each word whether it is in the common subsequence. `rows` has the initial row of
    bits, then one row for each word."""
    is_common = [False] * (len(rows) - 1)
    index, place = len(is_common), num_places
    while index and place:
        bit = 1 << (place - 1)
        if rows[index] & bit:
            place -= 1
            continue
        index -= 1
        if rows[index] & bit:
            is_common[index] = True
            place -= 1
    return is_common


def _parts(
    text: str, words: Sequence[tuple[str, str]], is_common: Sequence[bool]
) -> Iterator[TextPart]:
    """Yield the text in parts. White space is marked if the words on both sides are marked."""
    part, is_marked, num_chars = "", False, 0
    for (space, word), is_equal in zip(words, is_common, strict=True):
        num_chars += len(space) + len(word)
        if is_marked is not is_equal:
            part += space + word
            continue
        if is_equal:
            yield TextPart(part, is_different=True)
            part = space + word
        else:
            if part + space:
                yield TextPart(part + space)
            part = word
        is_marked = not is_equal
    if part:
        yield TextPart(part, is_marked)
    if num_chars < len(text):
        yield TextPart(text[num_chars:])
