"""The held-out rows: dataset rows that are never trained, so that they can measure what the model
has learnt. This module does no I/O."""

from __future__ import annotations

from collections.abc import Iterable

from fakevllm.admission.task_index import TextIndex, normalised
from fakevllm_adapters.protocol.swarm import Task


class HeldOutRows:
    """The rows of the held-out dataset, which are recognised by their texts.

    >>> rows = HeldOutRows([Task(task_id="1", main_query="What is 1 plus 2?")])
    >>> rows.are_quoted("Please answer:  what is 1 PLUS 2? Thanks"), rows.are_quoted("What is 1?")
    (True, False)
    """

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        self._index = TextIndex()
        self._texts: set[str] = set()
        for task in tasks:
            if text := normalised(task.main_query):
                self._texts.add(text)
                self._index.add(text)

    def are_quoted(self, *texts: str) -> bool:
        """Return True if at least one of the texts contains a held-out row. Case and white space
        are ignored."""
        if not self._texts:
            return False
        return any(self._index.contained_rows(normalised(text)) for text in texts)

    def overlapping(self, tasks: Iterable[Task]) -> list[Task]:
        """Return the tasks whose text contains a held-out row."""
        return [task for task in tasks if self.are_quoted(task.main_query)]
