"""The index of the latest groups (requests with their answers) and of their sessions. A group is
found by several keys, such as the hash of its message history.

The size of the index is bounded. When the index is full, the least recently used group is evicted.
A session is evicted together with its last group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import Generic, TypeVar

from fakevllm.sessions.normalize import PromptHash
from fakevllm.sessions.types import Kind

Key = TypeVar("Key")

MAX_GROUPS = 20_000
"""Maximum number of groups (requests with their answers) in the index. They need about 25 MB. A
busy team needs several days to make so many requests."""
NUM_RESTORED = 5_000
"""Maximum number of groups that the proxy reads from the ledger when it starts. This takes a
fraction of a second."""
MAX_MATCHES = 16
"""Maximum number of groups with the same key that a lookup considers, the latest first. Very many
groups may have the same key: for example, a health probe sends the same request again and again."""
EXCERPT_CHARS = 200
"""Maximum length of the stored excerpts of questions and answers, in characters."""


class GroupStatus(Enum):
    """The state of a group's answer: not complete yet, served or failed."""

    OPEN = "open"
    SERVED = "served"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class SessionNode:
    """A session (a conversation of an app) in the session tree."""

    id: str
    scope: str
    parent_id: str | None = None
    """Id of the session that started this session."""
    turn: int = 0
    """Number of the turn of the latest main call; 0 before the first main call. A main call is any
    request that the app does not make for itself (a side call, for example for a title)."""
    last_served: str | None = None
    """Id of the latest main call whose answer was served. Calls that the app makes for itself do
    not count."""
    last_main: str | None = None
    """Id of the latest main call. Calls that the app makes for itself do not count."""
    user: str = ""
    cache_key: str = ""
    first_question: str = ""
    """Excerpt of the first question."""
    last_question: str = ""
    """Excerpt of the latest question."""
    last_answer: str = ""
    """Excerpt of the latest answer."""
    num_groups: int = 0
    """Number of the session's groups in the index."""


@dataclass(slots=True, eq=False)
class GroupNode:
    """A request in the session tree, and its answer."""

    id: str
    session: SessionNode
    parent_id: str | None
    turn: int
    kind: Kind
    history_key: bytes
    """Key (hash) of the request's message history. The key is b"" if later requests cannot be
    recognized by the history."""
    system_key: bytes
    """Key (hash) of the system prompt."""
    size: int
    received_at: float
    """Time of a monotonic clock in seconds."""
    status: GroupStatus = GroupStatus.OPEN
    ended_at: float = 0.0
    """Time at which the answer was complete or failed, on the same clock as `received_at`. While
    the group is open, this time has no meaning."""
    is_repeated: bool = False
    """Whether a later request was recognized as a repetition of this request."""
    prompt_hash: PromptHash | None = None
    answered_key: bytes | None = None
    """Key (hash) of the request's message history followed by the served answer."""
    message_key: bytes | None = None
    """Key (hash) of the served answer alone; None if the same answer is likely to occur in several
    sessions."""
    call_ids: tuple[str, ...] = ()
    response_id: str | None = None
    continuations: dict[str, GroupNode] | None = None
    """Groups that continue this group's answer, by id."""

    def was_open_at(self, at: float) -> bool:
        """Return True if, at the time `at`, the request was still being answered: its answer was
        not complete, and the request had not failed."""
        return self.status is GroupStatus.OPEN or self.ended_at > at


class GroupIndex(Generic[Key]):
    """An index of groups by one kind of key, such as the hash of the message history. A group is a
    request with its answer.

    Several groups may have the same key, but most keys have only one group. To save memory, such a
    single group is stored without a dict around it.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, GroupNode | dict[str, GroupNode]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, key: Key, group: GroupNode) -> None:
        """Add `group` (a request with its answer) to this index under `key`. It counts as the
        latest group with this key."""
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = group
        elif isinstance(entry, dict):
            entry[group.id] = group
        elif entry is not group:
            self._entries[key] = {entry.id: entry, group.id: group}

    def remove(self, key: Key, group: GroupNode) -> None:
        """Remove `group` (a request with its answer) from the groups that this index has under
        `key`. Do nothing if it is not one of them."""
        entry = self._entries.get(key)
        if isinstance(entry, dict):
            entry.pop(group.id, None)
        if entry is group or entry == {}:
            del self._entries[key]

    def latest(self, key: Key) -> Iterator[GroupNode]:
        """Return the groups that this index has under `key`, the latest first, but at most
        MAX_MATCHES groups."""
        entry = self._entries.get(key)
        if entry is None:
            return iter(())
        if isinstance(entry, dict):
            return islice(reversed(entry.values()), MAX_MATCHES)
        return iter((entry,))

    def has(self, key: Key) -> bool:
        """Return True if this index has any group (a request with its answer) under `key`."""
        return key in self._entries


@dataclass(slots=True)
class SessionIndex:
    """All groups and sessions of the session tree, and the indexes by which groups are found."""

    max_groups: int = MAX_GROUPS
    groups: OrderedDict[str, GroupNode] = field(default_factory=OrderedDict[str, GroupNode])
    """Groups by id, the most recently used last."""
    sessions: OrderedDict[str, SessionNode] = field(default_factory=OrderedDict[str, SessionNode])
    """Sessions by id, the most recently used last."""
    by_history: GroupIndex[bytes] = field(default_factory=GroupIndex[bytes])
    """Groups by the key of their history."""
    by_answered: GroupIndex[bytes] = field(default_factory=GroupIndex[bytes])
    """Groups by the key of their history followed by the served answer."""
    by_message: GroupIndex[tuple[str, bytes]] = field(default_factory=GroupIndex[tuple[str, bytes]])
    """Groups by (scope, key of the served answer alone). The scope is the API key."""
    by_call_id: GroupIndex[tuple[str, str]] = field(default_factory=GroupIndex[tuple[str, str]])
    """Groups by (scope, id of a tool call in the served answer)."""
    by_response_id: GroupIndex[tuple[str, str]] = field(default_factory=GroupIndex[tuple[str, str]])
    """Groups by (scope, response id of the served answer)."""

    def session(self, session_id: str, scope: str) -> SessionNode:
        """Return the session with this id, and create it if it does not exist. Mark the session as
        the most recently used one."""
        session = self.sessions.get(session_id)
        if session is None:
            session = self.sessions[session_id] = SessionNode(session_id, scope)
        self.sessions.move_to_end(session_id)
        return session

    def add(self, group: GroupNode) -> None:
        """Add a group (a request with its answer) to this index of all groups, and link it to its
        parent. The parent is the earlier group whose answer the added group continues. If there are
        now too many groups, evict the least recently used groups."""
        group.session.num_groups += 1
        known = self.groups.get(group.id)
        if known is not None:
            self._evict(known)
        parent = self.groups.get(group.parent_id or "")
        if parent is not None:
            self.groups.move_to_end(parent.id)
            parent.continuations = parent.continuations or {}
            parent.continuations[group.id] = group
        self.groups[group.id] = group
        if group.history_key:
            self.by_history.add(group.history_key, group)
        while len(self.groups) > self.max_groups:
            self._evict(next(iter(self.groups.values())))

    def set_answer(
        self,
        group: GroupNode,
        *,
        answered_key: bytes | None,
        message_key: bytes | None,
        call_ids: tuple[str, ...],
        response_id: str | None,
    ) -> None:
        """Mark a group as served, and index the group by its answer. Later requests that repeat
        this answer or refer to this answer can then be recognized."""
        group.status, group.prompt_hash = GroupStatus.SERVED, None
        group.answered_key, group.message_key = answered_key, message_key
        group.call_ids, group.response_id = call_ids, response_id
        scope = group.session.scope
        if answered_key:
            self.by_answered.add(answered_key, group)
        if message_key:
            self.by_message.add((scope, message_key), group)
        for call_id in call_ids:
            self.by_call_id.add((scope, call_id), group)
        if response_id:
            self.by_response_id.add((scope, response_id), group)

    def _evict(self, group: GroupNode) -> None:
        del self.groups[group.id]
        scope = group.session.scope
        self.by_history.remove(group.history_key, group)
        if group.answered_key:
            self.by_answered.remove(group.answered_key, group)
        if group.message_key:
            self.by_message.remove((scope, group.message_key), group)
        for call_id in group.call_ids:
            self.by_call_id.remove((scope, call_id), group)
        if group.response_id:
            self.by_response_id.remove((scope, group.response_id), group)
        parent = self.groups.get(group.parent_id or "")
        if parent is not None and parent.continuations is not None:
            parent.continuations.pop(group.id, None)
        group.session.num_groups -= 1
        if group.session.num_groups == 0:
            del self.sessions[group.session.id]
