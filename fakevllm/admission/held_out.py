"""The held-out rows. These are dataset rows that are never trained, so that they can measure what
the model has learnt. This module does no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fakevllm.admission.task_index import normalised
from fakevllm_adapters.protocol.swarm import Task

NUM_SAFE_CHARS = 16
"""A row with at least this number of characters does not occur in unrelated texts by chance."""
_WORD = re.compile(r"[^\W_]")
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\uff66-\uff9f\U00020000-\U0003ffff]"
)
"""Letters of scripts in which a sentence may adjoin other letters without a space: Thai, Lao,
Burmese, Khmer, Chinese, Japanese and Korean."""


class HeldOutRows:
    """The rows of the held-out dataset. The rows are recognised by their texts.

    >>> rows = HeldOutRows([Task(task_id="1", main_query="What is 1 plus 2")])
    >>> [rows.are_quoted(text) for text in ("Say:  what is 1 PLUS 2? Thanks", "What is 1 plus 23")]
    [True, False]
    """

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        texts = (normalised(task.main_query) for task in tasks)
        self._texts = list(dict.fromkeys(filter(None, texts)))

    def __bool__(self) -> bool:
        return bool(self._texts)

    @property
    def short(self) -> list[str]:
        """Texts of held-out rows that are so short that unrelated texts may contain them."""
        return [text for text in self._texts if len(text) < NUM_SAFE_CHARS]

    def are_quoted(self, *texts: str) -> bool:
        """Return True if at least one of the texts contains the text of a held-out row. Case and
        white space are ignored. A row that is only a part of a longer word or number does not
        match."""
        if not self._texts:
            return False
        distinct = dict.fromkeys(texts)  # a request's first and last message are often one text
        return any(self._are_in(normalised(text)) for text in distinct)

    def overlapping(self, tasks: Iterable[Task]) -> list[Task]:
        """Return the tasks whose text contains the text of a held-out row."""
        return [task for task in tasks if self.are_quoted(task.main_query)]

    def _are_in(self, text: str) -> bool:
        # One search per row is faster than an index of the rows or one pattern for all of them: 100
        # rows take 20 ms per megabyte.
        return any(_is_quoted(row, text) for row in self._texts)


def _is_quoted(row: str, text: str) -> bool:
    start = text.find(row)
    while start >= 0:
        end = start + len(row)
        if not _is_within_word(text, start) and not _is_within_word(text, end):
            return True
        start = text.find(row, start + 1)
    return False


def _is_within_word(text: str, position: int) -> bool:
    """Return True if the characters before and after a position in `text` belong to the same word
    or number."""
    around = text[position - 1 : position + 1] if position > 0 else ""
    return len(around) == 2 and all(
        _WORD.match(char) is not None and _UNSPACED.match(char) is None for char in around
    )
