"""What is known of the latest groups and their sessions, found by key. Bounded: the group that was
of use least recently goes first, its session with the last of its groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Generic, TypeVar

from fakevllm.sessions.normalize import TextSoFar
from fakevllm.sessions.types import Kind

Key = TypeVar("Key")

NUM_KEPT = 20_000
"""Groups: some 25 MB, and days of a busy team."""
NUM_RESTORED = 5_000
"""Of them, that a proxy reads from the ledger at its start: a fraction of a second."""
NUM_ALIKE = 16
"""Groups of one key that are looked at, the latest first: a probe may ask the same for ever."""
EXCERPT_CHARS = 200


class Standing(Enum):
    OPEN = "open"
    SERVED = "served"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class Session:
    id: str
    scope: str
    parent_id: str | None = None
    turn: int = 0
    """Of its latest request that was no side call; 0 before the first."""
    last_served: str | None = None
    """The group."""
    last_asked: str | None = None
    """The latest group that was no side call."""
    user: str = ""
    cache_key: str = ""
    opening: str = ""
    question: str = ""
    answer: str = ""
    """Excerpts: of the first and the last question, and of the last answer."""
    num_groups: int = 0


@dataclass(slots=True, eq=False)
class Group:
    id: str
    session: Session
    parent_id: str | None
    turn: int
    kind: Kind
    asked: bytes
    system: bytes
    size: int
    received_at: float
    standing: Standing = Standing.OPEN
    ended_at: float = 0.0
    is_repeated: bool = False
    text: TextSoFar | None = None
    answered: bytes | None = None
    said: bytes | None = None
    call_ids: tuple[str, ...] = ()
    response_id: str | None = None
    after: dict[str, Group] | None = None
    """Those that go on from its answer, by id."""

    def ran_at(self, at: float) -> bool:
        return self.standing is Standing.OPEN or self.ended_at > at


class Index(Generic[Key]):
    """Groups by a key that several may share; most do not."""

    def __init__(self) -> None:
        self._found: dict[Key, Group | dict[str, Group]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, key: Key, group: Group) -> None:
        found = self._found.get(key)
        if found is None:
            self._found[key] = group
        elif isinstance(found, dict):
            found[group.id] = group
        elif found is not group:
            self._found[key] = {found.id: found, group.id: group}

    def remove(self, key: Key, group: Group) -> None:
        found = self._found.get(key)
        if isinstance(found, dict):
            found.pop(group.id, None)
        if found is group or found == {}:
            del self._found[key]

    def latest(self, key: Key) -> Iterator[Group]:
        """The latest first, NUM_ALIKE at most."""
        found = self._found.get(key)
        if found is None:
            return iter(())
        if isinstance(found, dict):
            return islice(reversed(found.values()), NUM_ALIKE)
        return iter((found,))

    def has(self, key: Key) -> bool:
        return key in self._found


@dataclass(slots=True)
class Memory:
    num_kept: int = NUM_KEPT
    groups: OrderedDict[str, Group] = field(default_factory=OrderedDict[str, Group])
    sessions: OrderedDict[str, Session] = field(default_factory=OrderedDict[str, Session])
    """The one that was of use latest is last."""
    asked: Index[bytes] = field(default_factory=Index[bytes])
    """By what was asked."""
    answered: Index[bytes] = field(default_factory=Index[bytes])
    """By what was asked and served."""
    said: Index[tuple[str, bytes]] = field(default_factory=Index[tuple[str, bytes]])
    """By scope and what was served alone."""
    calls: Index[tuple[str, str]] = field(default_factory=Index[tuple[str, str]])
    """By scope and an id of a call that was served."""
    responses: Index[tuple[str, str]] = field(default_factory=Index[tuple[str, str]])
    """By scope and response id."""

    def session(self, session_id: str, scope: str) -> Session:
        """Made where there is none."""
        session = self.sessions.get(session_id)
        if session is None:
            session = self.sessions[session_id] = Session(session_id, scope)
        self.sessions.move_to_end(session_id)
        return session

    def add(self, group: Group) -> None:
        group.session.num_groups += 1
        known = self.groups.get(group.id)
        if known is not None:
            self._forget(known)
        parent = self.groups.get(group.parent_id or "")
        if parent is not None:
            self.groups.move_to_end(parent.id)
            parent.after = parent.after or {}
            parent.after[group.id] = group
        self.groups[group.id] = group
        if group.asked:
            self.asked.add(group.asked, group)
        while len(self.groups) > self.num_kept:
            self._forget(next(iter(self.groups.values())))

    def serve(
        self,
        group: Group,
        answered: bytes | None,
        said: bytes | None,
        call_ids: tuple[str, ...],
        response_id: str | None,
    ) -> None:
        """Its answer is known: what later histories may hold of it."""
        group.standing, group.text = Standing.SERVED, None
        group.answered, group.said = answered, said
        group.call_ids, group.response_id = call_ids, response_id
        scope = group.session.scope
        if answered:
            self.answered.add(answered, group)
        if said:
            self.said.add((scope, said), group)
        for call_id in call_ids:
            self.calls.add((scope, call_id), group)
        if response_id:
            self.responses.add((scope, response_id), group)

    def _forget(self, group: Group) -> None:
        del self.groups[group.id]
        scope = group.session.scope
        self.asked.remove(group.asked, group)
        if group.answered:
            self.answered.remove(group.answered, group)
        if group.said:
            self.said.remove((scope, group.said), group)
        for call_id in group.call_ids:
            self.calls.remove((scope, call_id), group)
        if group.response_id:
            self.responses.remove((scope, group.response_id), group)
        parent = self.groups.get(group.parent_id or "")
        if parent is not None and parent.after is not None:
            parent.after.pop(group.id, None)
        group.session.num_groups -= 1
        if group.session.num_groups == 0:
            del self.sessions[group.session.id]
