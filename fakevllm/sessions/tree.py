"""The session tree, which finds the place of each request in its session, and stores each served
answer. A later request of the same conversation is recognized by the message history that it
repeats."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import orjson

from fakevllm.sessions.conversation_matching import (
    HistoryMatch,
    LookupResult,
    SessionLookup,
    padded,
    quotes,
)
from fakevllm.sessions.normalize import (
    MessageHistory,
    PromptEnds,
    PromptHash,
    normalize_history,
    normalize_message,
)
from fakevllm.sessions.session_index import (
    EXCERPT_CHARS,
    MAX_GROUPS,
    GroupNode,
    GroupStatus,
    SessionIndex,
    SessionNode,
)
from fakevllm.sessions.types import Evidence, IncomingRequest, Kind, Place, PlacedRequest

Json = dict[str, Any]

ORPHAN_WINDOW_S = 60.0
"""Seconds for which a side call (a call that the app makes for itself) waits for the first main
call of its session. An app may request the title of a conversation before it sends the first
question."""
MAX_DEPTH = 64
"""Maximum number of ancestors that are followed from a session to its root. Without this limit, the
search would not end if a client named sessions that started each other."""
NUM_ORPHANS = 32
"""Maximum number of side calls that wait for the first main call of their session."""
_ORPHAN_CHARS = 4_000
"""Maximum number of characters that are stored of the text of a side call that waits."""


class _Orphan(NamedTuple):
    """A side call that quotes a question, and arrived before the request with this question. A side
    call is a call that the app makes for itself, for example for a title."""

    session_id: str
    text: str
    received_at: float


class SessionTree:
    """The sessions of all apps. The tree does no I/O, and gets the time as an argument. Only one
    thread may use the tree."""

    def __init__(self, max_groups: int = MAX_GROUPS) -> None:
        self._index = SessionIndex(max_groups)
        self._lookup = SessionLookup(self._index)
        self._ends = PromptEnds()
        self._orphans: deque[_Orphan] = deque(maxlen=NUM_ORPHANS)

    def __len__(self) -> int:
        """Return the number of groups (requests with their sampled answers) in the tree."""
        return len(self._index.groups)

    @property
    def num_keys(self) -> int:
        """Number of entries that the tree holds: the keys of its indexes, the sessions, and the
        links from requests to their continuations. Tests check that this number does not exceed a
        limit."""
        index = self._index
        group_indexes = (
            index.by_history,
            index.by_answered,
            index.by_message,
            index.by_call_id,
            index.by_response_id,
        )
        num_links = sum(len(group.continuations or ()) for group in index.groups.values())
        return sum(map(len, group_indexes)) + len(index.sessions) + num_links

    def history_of(
        self, body: Json, prompt: str, scope: str
    ) -> tuple[MessageHistory, PromptHash | None]:
        """Return (message history, hash of the prompt) for a request.

        `body` is the request body in the format of the upstream server. If it has messages, the
        history is made from them, and the hash is None. Otherwise the history is made from
        `prompt`. The hash is then that of the prompt, or None if the prompt is empty.
        """
        messages: object = body.get("messages")
        if isinstance(messages, list):
            return normalize_history(cast(list[Any], messages), scope), None
        history = self._ends.history_of(prompt, scope)
        return history, PromptHash(prompt, scope) if prompt else None

    def find(self, request: IncomingRequest) -> LookupResult:
        """Return the session of a request, and its parent (the earlier request whose answer it
        continues). The tree is not changed."""
        session_id = _named_session_id(request)
        named = self._index.sessions.get(session_id) if session_id else None
        return self._lookup.find(request, named)

    def place(self, request: IncomingRequest, lookup: LookupResult | None = None) -> Place:
        """Add a request to the tree, and return its place: its session, its turn, and its parent
        (the earlier request whose answer it continues). The request counts as not yet answered
        until `served` or `failed` is called.

        Call this method once for each request. If `find` was called just before, pass its result as
        `lookup` to avoid a second lookup.
        """
        lookup = lookup or self.find(request)
        session = lookup.session or self._open_session(request)
        kind = self._kind(request, lookup, session)
        if kind is Kind.REPEATS:
            self._note_repeated(request, session)
        parent_id = lookup.parent.id if lookup.parent else None
        if kind is Kind.SUB_AGENT and session.parent_id in self._index.sessions:
            parent_id = parent_id or self._index.sessions[session.parent_id].last_served
        place = Place(
            session_id=session.id,
            parent_id=parent_id,
            turn=self._turn(request, lookup, session, kind),
            kind=kind,
            evidence=lookup.evidence,
            parent_session_id=session.parent_id,
            asked_key=request.history.key.hex(),
        )
        self._add(request, session, place)
        return place

    def root_of(self, session_id: str) -> str:
        """Return the id of the root of a session's tree. The root is the session that no other
        session of the tree has started. A session that was evicted from the index counts as a root.
        """
        for _ in range(MAX_DEPTH):
            session = self._index.sessions.get(session_id)
            if session is None or session.parent_id is None:
                break
            session_id = session.parent_id
        return session_id

    def served(
        self, group_id: str, message: Json, at: float, response_id: str | None = None
    ) -> None:
        """Store the message with which the request of this group was answered. `at` is the time of
        the answer, on the same clock as the requests' `received_at`."""
        group = self._index.groups.get(group_id)
        if group is None:
            return
        group.ended_at = at
        content: object = message.get("content")
        text = content if isinstance(content, str) else ""
        if group.prompt_hash is not None:
            ended = group.prompt_hash.with_answer(text)
            if ended is not None:
                self._ends.add(ended[1])
            return self._index.set_answer(
                group,
                answered_key=ended[0] if ended else None,
                message_key=None,
                call_ids=(),
                response_id=response_id,
            )
        answer = normalize_message(group.history_key, {"role": "assistant"} | message)
        answered_key = answer.history_key if answer else group.history_key
        self._index.set_answer(
            group,
            answered_key=answered_key if group.history_key else None,
            message_key=answer.key if answer is not None and answer.is_distinctive else None,
            call_ids=answer.call_ids if answer else (),
            response_id=response_id,
        )
        if group.kind is not Kind.SIDE:
            group.session.last_served = group.id
            group.session.last_answer = _excerpt(text)

    def failed(self, group_id: str, at: float) -> None:
        """Record that the app did not get a whole answer to the request of this group. `at` is the
        time, on the same clock as the requests' `received_at`."""
        group = self._index.groups.get(group_id)
        if group is not None:
            group.status, group.ended_at, group.prompt_hash = GroupStatus.FAILED, at, None

    def restore(self, requests: Iterable[PlacedRequest], *, now: float, unix_now: float) -> None:
        """Add requests that earlier proxy processes received, each at its recorded place in its
        session. The oldest request comes first.

        `now` is the current time on the tree's clock, and `unix_now` is the current time in Unix
        seconds. The recorded time of a request can be in the future if the system clock was set
        back. Such a request counts as received at `now`.
        """
        for placed in requests:
            place = placed.place
            received_at = now - max(0.0, unix_now - placed.received_at)
            session = self._index.session(place.session_id, placed.scope)
            session.parent_id = place.parent_session_id
            request = IncomingRequest(
                group_id=placed.group_id,
                scope=placed.scope,
                history=MessageHistory(b""),
                received_at=received_at,
            )
            self._add(request, session, place)
            if placed.message_json is None:
                self.failed(placed.group_id, received_at)
            else:
                message: Json = orjson.loads(placed.message_json)
                self.served(placed.group_id, message, received_at, placed.response_id)

    def _open_session(self, request: IncomingRequest) -> SessionNode:
        """Return the session for a request whose message history matches no session.

        The first of these rules that applies decides:

        1. If the request contains the name of a session, the request gets the session of that name.
        2. If the request is not a side call, and an earlier side call quotes its question, the
           request gets the session of the side call. A side call is a call that the app makes for
           itself, for example for a title.
        3. The request gets a new session.
        """
        session_id = _named_session_id(request)
        adopted = None if session_id or request.is_side else self._adopting_session(request)
        session = self._index.session(session_id or adopted or request.group_id, request.scope)
        if request.hints.parent:
            session.parent_id = _session_id(request.scope, request.hints.parent)
        if session_id is None and request.is_side:
            text = request.history.user_text[:_ORPHAN_CHARS]
            self._orphans.append(_Orphan(session.id, text, request.received_at))
        return session

    def _adopting_session(self, request: IncomingRequest) -> str | None:
        """Return the id of the existing session that the main call `request` should join, or None.

        Before a main call (a request of the user or the agent), a client may send a side call, for
        example a request for a title. The side call then opens a session. The main call joins this
        session if the side call quotes the main call's question, and if the session has no main
        call yet.
        """
        question = _excerpt(request.history.question)
        for orphan in self._orphans:
            session = self._index.sessions.get(orphan.session_id)
            is_late = request.received_at - orphan.received_at > ORPHAN_WINDOW_S
            if session is None or session.turn or session.scope != request.scope or is_late:
                continue
            if quotes(padded(orphan.text), question):
                return session.id
        return None

    def _kind(self, request: IncomingRequest, lookup: LookupResult, session: SessionNode) -> Kind:
        if request.is_side:
            return Kind.SIDE
        if session.turn == 0:
            return Kind.NEW if session.parent_id is None else Kind.SUB_AGENT
        same = self._same_history(request, session)
        if same is not None:
            if same.was_open_at(request.received_at) and not request.hints.is_retry:
                return Kind.PARALLEL
            is_served = same.status is GroupStatus.SERVED
            is_answered = is_served and lookup.evidence is not Evidence.RETRY
            return Kind.REGENERATES if is_answered else Kind.REPEATS
        if lookup.parent is None:
            return self._kind_without_parent(request, lookup, session)
        if self._has_only_the_answer(request, lookup):
            return Kind.COMPACTED
        return self._kind_after(request, lookup.parent, lookup.base)

    def _kind_without_parent(
        self, request: IncomingRequest, lookup: LookupResult, session: SessionNode
    ) -> Kind:
        if lookup.base is not None:  # the answer that the request continues was cut off
            return Kind.CONTINUES
        last_main = self._index.groups.get(session.last_main or "")
        if last_main is not None and last_main.was_open_at(request.received_at):
            return Kind.PARALLEL
        return Kind.COMPACTED if request.history.has_answers else Kind.EDITS

    def _kind_after(
        self, request: IncomingRequest, parent: GroupNode, base: HistoryMatch | None
    ) -> Kind:
        """Return PARALLEL, EDITS or CONTINUES for a request that continues the answer of the
        earlier request `parent`.

        `base` is the latest earlier request whose question or answer was found in this request's
        history. If `base` is another request than `parent`, the kind is CONTINUES. Otherwise the
        kind depends on the other requests of the session that continue the answer of `parent`:

        * PARALLEL: at least one of these requests was not answered yet when this request arrived.
        * EDITS: all of these requests were answered or failed, and at least one was answered.
        * CONTINUES: in all other cases.
        """
        if base is not None and base.group is not parent:
            return Kind.CONTINUES
        others = [
            group
            for group in (parent.continuations or {}).values()
            if group.kind is not Kind.SIDE and group.session is parent.session
        ]
        if any(group.was_open_at(request.received_at) for group in others):
            return Kind.PARALLEL
        is_continued = any(group.status is GroupStatus.SERVED for group in others)
        return Kind.EDITS if is_continued else Kind.CONTINUES

    def _has_only_the_answer(self, request: IncomingRequest, lookup: LookupResult) -> bool:
        """Return True if the request's history contains the answer of its parent, but the messages
        before that answer differ from the parent's messages. The parent is the earlier request that
        the request continues."""
        if lookup.base is None or lookup.base.group is not lookup.parent:
            return False
        parent = lookup.base.group
        if lookup.base.at < 0 or parent.message_key is None:
            return False
        message = request.history.messages[lookup.base.at]
        return message.key == parent.message_key and message.history_key != parent.answered_key

    def _turn(
        self, request: IncomingRequest, lookup: LookupResult, session: SessionNode, kind: Kind
    ) -> int:
        if kind is Kind.SIDE:
            return max(1, session.turn)
        if kind in (Kind.REGENERATES, Kind.REPEATS):
            same = self._same_history(request, session)
            assert same is not None, "the kind says that a group has the same history"
            return same.turn
        if lookup.base is not None:
            return lookup.base.group.turn + request.history.turns_after(lookup.base.at)
        if kind is Kind.COMPACTED:
            return session.turn + _ends_with_user(request.history)
        return max(1, request.history.turns_after(-1))

    def _same_history(self, request: IncomingRequest, session: SessionNode) -> GroupNode | None:
        """Return the session's latest main call (a request of the user or the agent) that has the
        same history as the request, or None."""
        for group in self._index.by_history.latest(request.history.key):
            if group.session is session and group.kind is not Kind.SIDE:
                return group
        return None

    def _note_repeated(self, request: IncomingRequest, session: SessionNode) -> None:
        for group in self._index.by_history.latest(request.history.key):
            if group.session is session:
                group.is_repeated = True

    def _add(self, request: IncomingRequest, session: SessionNode, place: Place) -> None:
        """Add a group for `request` to the tree at `place`, and update its session."""
        history, hints = request.history, request.hints
        session.user = hints.user or session.user
        session.cache_key = hints.cache_key or session.cache_key
        self._index.session(session.id, session.scope)  # marks it as the most recently used
        if place.kind is not Kind.SIDE:
            session.turn, session.last_main = place.turn, request.group_id
            session.last_question = _excerpt(history.question)
            session.first_question = session.first_question or session.last_question
        self._index.add(
            GroupNode(
                id=request.group_id,
                session=session,
                parent_id=place.parent_id,
                turn=place.turn,
                kind=place.kind,
                history_key=bytes.fromhex(place.asked_key),
                system_key=history.system_key,
                size=request.size,
                received_at=request.received_at,
                prompt_hash=request.prompt_hash,
            )
        )


def _named_session_id(request: IncomingRequest) -> str | None:
    """Return the id of the session whose name is in the request's headers or body. Return None if
    they contain no name of a session."""
    name = request.hints.session
    return _session_id(request.scope, name) if name else None


@lru_cache(1024)
def _session_id(scope: str, name: str) -> str:
    """Return the id for a session name that a client sent. The same name and scope (API key) always
    give the same id, also after a restart."""
    return blake2b(f"{scope}\0{name}".encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _excerpt(text: str) -> str:
    return text.strip()[:EXCERPT_CHARS]


def _ends_with_user(history: MessageHistory) -> bool:
    return bool(history.messages) and history.messages[-1].is_from_user
