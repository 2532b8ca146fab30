"""The index that finds the task of a request, by the request's API key or by its text. A task is a
dataset row: a query with metadata such as the reference answer. This module does no I/O."""

from __future__ import annotations

import hmac
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from fakevllm_adapters.protocol.keys import KeyRing, fingerprint, task_id_of, task_key
from fakevllm_adapters.protocol.swarm import Task

_NUM_PREFIX_CHARS = 16
"""A row is looked up by this number of characters at its beginning. Few rows of a dataset begin
with the same 16 characters.
"""
_NUM_MAC_DIGITS = 16
"""Number of hexadecimal digits of a task key's signature."""


class TaskIndex:
    """Index of all registered tasks. Every task can be found by its task key, an API key
    `sk-task-…` that an app can send with its requests. Tasks of the proxy's own dataset can also be
    found by their text.

    Who owns a task depends on whether the proxy requires API keys:

    * If the proxy requires API keys, a task belongs to the API key that registered the task. Only
      the holder of this API key can replace the task. The task key is signed, and contains the
      fingerprint of this API key. The task key is valid only while this API key is valid.
    * If the proxy requires no API keys, tasks belong to nobody, and a task key may be unsigned.
    """

    def __init__(self, secret: bytes | None = None, keys: KeyRing | None = None) -> None:
        """Create an empty index. `secret` signs task keys (API keys `sk-task-…` that name a task).
        If `secret` is None, task keys are not signed. `keys` are the API keys that the proxy
        accepts."""
        self._secret = secret
        self._keys = KeyRing() if keys is None else keys
        self._tasks: dict[str, Task] = {}
        self._owners: dict[str, str] = {}
        """Fingerprint of the API key that registered a task, by the task's id."""
        self._dataset: dict[str, Task] = {}
        """Rows of the proxy's own dataset, by id."""
        self._by_text: defaultdict[str, list[Task]] = defaultdict(list)
        self._texts = TextIndex()
        self.counts: Counter[str] = Counter()
        """Number of look-ups by text, for each result: hit (one task), miss (no task) or tie
        (several tasks)."""

    def add_dataset(self, tasks: Iterable[Task]) -> None:
        """Add the tasks of the proxy's own dataset. From then on, a request that contains the text
        of exactly one of these tasks is matched with this task."""
        for task in tasks:
            self._tasks[task.task_id] = self._dataset[task.task_id] = task
            if text := normalised(task.main_query):
                self._by_text[text].append(task)
                self._texts.add(text)

    def owner_of(self, key: str | None) -> str | None:
        """Return the owner to record for tasks that an app registers with this API key. The owner
        is the key's fingerprint. The result is None if the proxy requires no API keys."""
        return fingerprint(key) if key and self._keys else None

    def ids_of_others(self, tasks: Iterable[Task], owner: str | None) -> list[str]:
        """Return the ids of the given tasks that `owner` must not register. `owner` is the
        fingerprint of an API key.

        There are two cases in which `owner` must not register a task. Another valid API key has
        registered a task with the same id, or the dataset has a different task with the same id. If
        `owner` is None, the result is empty.
        """
        return [task.task_id for task in tasks if owner and not self._may_register(task, owner)]

    def add(self, tasks: Sequence[Task], owner: str | None = None) -> None:
        """Register tasks for an owner (the fingerprint of an API key, or None). A task replaces an
        earlier task with the same id."""
        for task in tasks:
            self._tasks[task.task_id] = task
            if owner is None or self._is_row(task):
                self._owners.pop(task.task_id, None)
            else:
                self._owners[task.task_id] = owner

    def key(self, task_id: str, owner: str | None = None) -> str:
        """Return the task key (`sk-task-…`) of a task that `owner` has registered. A request that
        an app sends with the task key as its API key belongs to the task."""
        if self._secret is None:
            return task_key(task_id)
        name = task_id if owner is None else f"{task_id}.{owner}"
        return f"{task_key(name)}.{self._mac(self._secret, task_id, owner)}"

    def knows(self, key: str | None) -> bool:
        """Return True if `key` is a valid task key and the task is registered. A task key has the
        form `sk-task-…` and names a task."""
        return self._by_key(key) is not None

    def registering_key(self, key: str | None) -> str | None:
        """Return the fingerprint of the API key that registered a task. `key` is the task key
        (`sk-task-…`), which contains this fingerprint. Return None if `key` is not a task key, if
        it contains no fingerprint, or if its signature is wrong. The result for one key never
        changes."""
        task_id = task_id_of(key)
        if task_id is None or self._secret is None:
            return None
        name, _, mac = task_id.rpartition(".")
        signed, _, owner = name.rpartition(".")
        return owner if _are_equal(mac, self._mac(self._secret, signed, owner)) else None

    def stores_nothing(self, key: str | None) -> bool:
        """Return True if nothing is stored of the requests with this API key. A task key
        (`sk-task-…`) is treated as the API key that registered the task."""
        owner = self.registering_key(key)
        entry = None if owner is None else self._keys.with_fingerprint(owner)
        return self._keys.stores_nothing(key) if entry is None else entry.stores_nothing

    def key_names(self, key: str | None) -> tuple[str, ...]:
        """Return the names by which an admission rule may refer to an API key: the key's name in
        the key file, and the key's fingerprint. For a task key (`sk-task-…`), also return the names
        of the API key that registered the task."""
        if not key:
            return ()
        owner = self.registering_key(key)
        entry = None if owner is None else self._keys.with_fingerprint(owner)
        name = self._keys.name_of(key) if entry is None else entry.name
        return tuple(filter(None, (name, owner, fingerprint(key))))

    def find(self, key: str | None, opening: str) -> Task | None:
        """Return the task to which a request belongs, or None.

        If the request's API key is a task key (`sk-task-…`), the key names the task. For any other
        key, the function searches `opening` for the texts of the dataset's tasks. `opening` is the
        text of the first user message. If `opening` contains the text of exactly one task, return
        this task. If one matching text is part of another matching text, only the longer text
        counts.
        """
        if task_id_of(key) is not None:
            return self._by_key(key)
        return self._by_opening(opening) if self._by_text else None

    def by_id(self, task_id: str | None) -> Task | None:
        return self._tasks.get(task_id or "")

    def texts_by_id(self, texts: set[str]) -> dict[str, str]:
        """Find the tasks whose normalised text is in `texts`. Return a dict from each task's id to
        its normalised text. The method may be called from any thread."""
        pairs = [(id, normalised(task.main_query)) for id, task in list(self._tasks.items())]
        return {id: text for id, text in pairs if text in texts}

    def _may_register(self, task: Task, owner: str) -> bool:
        registered, other = self._tasks.get(task.task_id), self._owners.get(task.task_id)
        if other is not None:
            return other == owner or self._keys.with_fingerprint(other) is None
        return registered is None or self._is_row(task) or not self._is_row(registered)

    def _is_row(self, task: Task) -> bool:
        """Return True if the proxy's dataset contains this task, with the same id and the same
        content."""
        return self._dataset.get(task.task_id) == task

    def _by_key(self, key: str | None) -> Task | None:
        task_id = task_id_of(key)
        if task_id is None:
            return None
        owner = self.registering_key(key)
        if owner is not None:
            return self._of_owner(task_id.rsplit(".", 2)[0], owner)
        if self._keys:
            return None
        if self._secret is not None:
            signed, _, mac = task_id.rpartition(".")
            if _are_equal(mac, self._mac(self._secret, signed, None)):
                return self._tasks.get(signed)
        return self._tasks.get(task_id)

    def _of_owner(self, task_id: str, owner: str) -> Task | None:
        """Return the task with the id `task_id` if `owner` may use it, else None.

        `owner` is the fingerprint of an API key. While this API key is valid, `owner` may use the
        tasks that were registered with the key, and the tasks of the dataset. If the proxy requires
        no API keys, everybody may use every task.
        """
        task = self._tasks.get(task_id)
        if task is None or not self._keys:
            return task
        is_registered = self._owners.get(task_id) == owner or self._is_row(task)
        return task if is_registered and self._keys.with_fingerprint(owner) is not None else None

    @staticmethod
    def _mac(secret: bytes, task_id: str, owner: str | None) -> str:
        if owner is not None:  # a secret of its own, so that no task id can imitate an owner
            secret = hmac.digest(secret, owner.encode(), "sha256")
        return hmac.new(secret, task_id.encode(), "sha256").hexdigest()[:_NUM_MAC_DIGITS]

    def _by_opening(self, opening: str) -> Task | None:
        text = normalised(opening)
        tasks = self._by_text.get(text) or self._contained_tasks(text)
        result = "miss" if not tasks else "hit" if len(tasks) == 1 else "tie"
        self.counts[result] += 1
        return tasks[0] if result == "hit" else None

    def _contained_tasks(self, text: str) -> list[Task]:
        """Return the dataset tasks whose texts are contained in `text`.

        If one of these texts is part of another, only the task with the longer text is returned.
        """
        matches = self._texts.contained_rows(text)
        longest = [
            row for row in matches if not any(row != other and row in other for other in matches)
        ]
        return [task for row in longest for task in self._by_text[row]]


class TextIndex:
    """Index of short texts, called rows. Given a long text, the index finds all rows that this text
    contains, in one pass over the long text.

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
        """Rows by their first characters, then by their length. One look-up checks all rows that
        have the same first characters and the same length."""

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
    """Return the text in lower case. Each run of white space becomes one space. White space at both
    ends is removed.

    >>> normalised("  What is\\n1 plus 2? ")
    'what is 1 plus 2?'
    """
    return " ".join(text.split()).lower()  # three times as fast as a pattern


def _are_equal(mac: str, expected: str) -> bool:
    return hmac.compare_digest(mac.encode(), expected.encode())
