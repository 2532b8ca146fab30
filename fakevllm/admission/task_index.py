"""Index of tasks by API key and by text: finds the task that a request belongs to. Pure."""

from __future__ import annotations

import hmac
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from fakevllm_adapters.protocol.keys import task_id_of, task_key
from fakevllm_adapters.protocol.swarm import Task

_WHITE_SPACE = re.compile(r"\s+")
_NUM_PREFIX_CHARS = 16
"""Number of first characters by which rows are looked up. Few rows of a dataset have the same first
characters."""
_NUM_MAC_DIGITS = 16
"""Number of hexadecimal digits of a task key's signature."""


class TaskIndex:
    """Tasks by id, and optionally by their text. If there is a secret, task keys are signed."""

    def __init__(
        self, secret: bytes | None = None, accepts_unsigned: Callable[[], bool] | None = None
    ) -> None:
        """Create an empty index.

        `secret`: key that signs task keys; None: task keys are not signed. `accepts_unsigned` is
        called for each look-up, and returns whether a task key without a signature is accepted. By
        default, such a key is accepted only if there is no secret.
        """
        self._secret = secret
        self._accepts_unsigned = accepts_unsigned or (lambda: secret is None)
        self._tasks: dict[str, Task] = {}
        self._by_text: defaultdict[str, list[Task]] = defaultdict(list)
        self._texts = TextIndex()
        self.counts: Counter[str] = Counter()
        """Number of text look-ups by their result: hit, miss, tie."""

    def add(self, tasks: Iterable[Task], *, by_text: bool = False) -> None:
        """Register tasks. `by_text`: whether a request may also find them by their text."""
        for task in tasks:
            self._tasks[task.task_id] = task
            if by_text and (text := normalised(task.main_query)):
                self._by_text[text].append(task)
                self._texts.add(text)

    def key(self, task_id: str) -> str:
        """Return the API key that names this task."""
        if self._secret is None:
            return task_key(task_id)
        return f"{task_key(task_id)}.{self._mac(self._secret, task_id)}"

    def knows(self, key: str | None) -> bool:
        """Return whether `key` names a registered task."""
        return self._by_key(key) is not None

    def find(self, key: str | None, opening: str) -> Task | None:
        """Return the task of a request, or None.

        For a key `sk-task-…` it is the task that the key names. For any other key it is the task
        whose text the first user message, `opening`, contains, if there is exactly one.
        """
        if task_id_of(key) is not None:
            return self._by_key(key)
        return self._by_opening(opening) if self._by_text else None

    def by_id(self, task_id: str | None) -> Task | None:
        return self._tasks.get(task_id or "")

    def _by_key(self, key: str | None) -> Task | None:
        task_id = task_id_of(key)
        if task_id is None:
            return None
        if self._secret is not None:
            signed, _, mac = task_id.rpartition(".")
            if hmac.compare_digest(mac.encode(), self._mac(self._secret, signed).encode()):
                return self._tasks.get(signed)
        return self._tasks.get(task_id) if self._accepts_unsigned() else None

    @staticmethod
    def _mac(secret: bytes, task_id: str) -> str:
        return hmac.new(secret, task_id.encode(), "sha256").hexdigest()[:_NUM_MAC_DIGITS]

    def _by_opening(self, opening: str) -> Task | None:
        text = normalised(opening)
        tasks = self._by_text.get(text) or self._contained_tasks(text)
        result = "miss" if not tasks else "hit" if len(tasks) == 1 else "tie"
        self.counts[result] += 1
        return tasks[0] if result == "hit" else None

    def _contained_tasks(self, text: str) -> list[Task]:
        """Return the tasks whose texts `text` contains.

        A task whose text is part of another matching task's text is left out.
        """
        matches = self._texts.contained_rows(text)
        longest = [
            row for row in matches if not any(row != other and row in other for other in matches)
        ]
        return [task for row in longest for task in self._by_text[row]]


class TextIndex:
    """Index of texts (rows) that finds all rows contained in another text, in one pass over it.

    >>> index = TextIndex()
    >>> index.add("what is 1 plus 2?")
    >>> index.contained_rows("so, what is 1 plus 2? thanks")
    {'what is 1 plus 2?'}
    """

    def __init__(self) -> None:
        self._short: set[str] = set()
        self._long: defaultdict[str, defaultdict[int, set[str]]] = defaultdict(
            lambda: defaultdict(set)
        )
        """Rows by their first characters, then by their length. All rows of equal beginning and
        length cost one look-up."""

    def add(self, row: str) -> None:
        if len(row) < _NUM_PREFIX_CHARS:
            self._short.add(row)
        else:
            self._long[row[:_NUM_PREFIX_CHARS]][len(row)].add(row)

    def contained_rows(self, text: str) -> set[str]:
        """Return the rows that `text` contains."""
        matches = {row for row in self._short if row in text}
        for start in range(len(text) - _NUM_PREFIX_CHARS + 1):
            by_length = self._long.get(text[start : start + _NUM_PREFIX_CHARS])
            for length, rows in by_length.items() if by_length is not None else ():
                if (part := text[start : start + length]) in rows:
                    matches.add(part)
        return matches


def normalised(text: str) -> str:
    """Return the text in lower case, with all white space as single spaces.

    >>> normalised("  What is\\n1 plus 2? ")
    'what is 1 plus 2?'
    """
    return _WHITE_SPACE.sub(" ", text).strip().lower()
