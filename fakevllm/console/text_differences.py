"""Mark the words in which answers differ from a reference answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

MAX_COMPARISONS = 4_000_000
"""Maximum number of pairs of words that are compared for one group, which takes about a second. The
time of a comparison grows with the product of both lengths."""
_WORD = re.compile(r"\w+|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class TextPart:
    """A part of a text, and whether the part is missing in the reference."""

    text: str
    is_different: bool = False


def mark_differences(texts: Sequence[str], reference: str) -> list[list[TextPart]]:
    """Return each text in parts. A part is marked if `reference` does not have it at this place.
    Nothing is marked in texts that are too long to be compared.

    >>> [part.text for part in mark_differences(["It is 42."], "It is 41.")[0] if part.is_different]
    ['42']
    """
    reference_words = _WORD.findall(reference)
    num_left = MAX_COMPARISONS
    marked: list[list[TextPart]] = []
    for text in texts:
        words = _WORD.findall(text)
        num = len(words) * len(reference_words)
        if text == reference or num > num_left:
            marked.append([TextPart(text)])
            continue
        num_left -= num
        marked.append(list(_parts(words, reference_words)))
    return marked


def _parts(words: list[str], reference: list[str]) -> Iterator[TextPart]:
    matcher = SequenceMatcher(None, reference, words, autojunk=False)
    for tag, _, _, start, end in matcher.get_opcodes():
        if start < end:
            yield TextPart("".join(words[start:end]), tag != "equal")
