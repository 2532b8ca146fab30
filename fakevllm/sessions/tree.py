"""The tree of conversations: every request gets its place as it comes, every served answer becomes
something that later histories may hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple, cast

import orjson

from fakevllm.sessions.index import (
    EXCERPT_CHARS,
    NUM_KEPT,
    Group,
    Memory,
    Session,
    Standing,
)
from fakevllm.sessions.lookup import Finder, Found, Hit, padded, quotes
from fakevllm.sessions.normalize import History, TextEnds, TextSoFar, history_of, said_after
from fakevllm.sessions.types import Asked, Evidence, Kind, Place, PlacedRequest

Json = dict[str, Any]

ORPHAN_WINDOW_S = 60.0
"""A title may be asked for before what it is the title of."""
NUM_ORPHANS = 32
_ORPHAN_CHARS = 4_000


class _Orphan(NamedTuple):
    """A side call that quotes a question nobody has asked yet."""

    session_id: str
    text: str
    received_at: float


class Conversations:
    """Pure: time comes with the requests. One thread's."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._memory = Memory(num_kept)
        self._finder = Finder(self._memory)
        self._ends = TextEnds()
        self._orphans: deque[_Orphan] = deque(maxlen=NUM_ORPHANS)

    def __len__(self) -> int:
        """Groups that are remembered."""
        return len(self._memory.groups)

    @property
    def num_keys(self) -> int:
        """All that is kept to find them by, sessions and links included. Counts: for tests."""
        known = self._memory
        indexes = (known.asked, known.answered, known.said, known.calls, known.responses)
        num_links = sum(len(group.after or ()) for group in known.groups.values())
        return sum(map(len, indexes)) + len(known.sessions) + num_links

    def history_of(self, body: Json, prompt: str, scope: str) -> tuple[History, TextSoFar | None]:
        """Of a body of the upstream's; `prompt` where it has no messages."""
        messages: object = body.get("messages")
        if isinstance(messages, list):
            return history_of(cast(list[Any], messages), scope), None
        history = self._ends.history_of(prompt, scope)
        return history, TextSoFar(prompt, scope) if prompt else None

    def find(self, asked: Asked) -> Found:
        """Where a request would be placed; changes nothing."""
        name = _name_of(asked)
        return self._finder.find(asked, self._memory.sessions.get(name) if name else None)

    def place(self, asked: Asked, found: Found | None = None) -> Place:
        """Once for each group; it is open until `served` or `failed`. `found`: where it has just
        been looked up."""
        name = _name_of(asked)
        found = found or self.find(asked)
        session = found.session or self._opened(asked, name)
        kind = self._kind(asked, found, session)
        if kind is Kind.REPEATS:
            self._note_repeated(asked, session)
        parent_id = found.parent.id if found.parent else None
        if kind is Kind.SUB_AGENT and session.parent_id in self._memory.sessions:
            parent_id = parent_id or self._memory.sessions[session.parent_id].last_served
        turn = self._turn(asked, found, session, kind)
        self._keep(asked, session, parent_id, turn, kind)
        return Place(
            session_id=session.id,
            parent_id=parent_id,
            turn=turn,
            kind=kind,
            evidence=found.evidence,
            parent_session_id=session.parent_id,
            asked_key=asked.history.end.hex(),
        )

    def served(
        self, group_id: str, message: Json, at: float, response_id: str | None = None
    ) -> None:
        """The app got `message`."""
        group = self._memory.groups.get(group_id)
        if group is None:
            return
        group.ended_at = at
        content: object = message.get("content")
        if group.text is not None:
            ended = group.text.ended_by(content if isinstance(content, str) else "")
            if ended is not None:
                self._ends.add(ended[1])
            return self._memory.serve(group, ended[0] if ended else None, None, (), response_id)
        said = said_after(group.asked, {"role": "assistant"} | message)
        answered = None if not group.asked else said.end if said else group.asked
        telling = said.key if said is not None and said.is_telling else None
        self._memory.serve(group, answered, telling, said.call_ids if said else (), response_id)
        if group.kind is not Kind.SIDE:
            group.session.last_served = group.id
            group.session.answer = _excerpt(content if isinstance(content, str) else "")

    def failed(self, group_id: str, at: float) -> None:
        """The app got no answer, or not the whole of it."""
        group = self._memory.groups.get(group_id)
        if group is not None:
            group.standing, group.ended_at, group.text = Standing.FAILED, at, None

    def restore(self, groups: Iterable[PlacedRequest]) -> None:
        """What an earlier life knew, oldest first."""
        for kept in groups:
            place = kept.place
            session = self._memory.session(place.session_id, kept.scope)
            session.parent_id = place.parent_session_id
            asked = Asked(
                group_id=kept.group_id,
                scope=kept.scope,
                history=History(b""),
                received_at=kept.received_at,
            )
            key = bytes.fromhex(place.asked_key)
            self._keep(asked, session, place.parent_id, place.turn, place.kind, key)
            if kept.message_json is None:
                self.failed(kept.group_id, kept.received_at)
            else:
                message: Json = orjson.loads(kept.message_json)
                self.served(kept.group_id, message, kept.received_at, kept.response_id)

    def _opened(self, asked: Asked, name: str | None) -> Session:
        """A session that was not known: one a side call has been waiting for, or a new one."""
        waiting = None if name or asked.is_side else self._adopted(asked)
        session = self._memory.session(name or waiting or asked.group_id, asked.scope)
        if asked.hints.parent:
            session.parent_id = _session_id(asked.scope, asked.hints.parent)
        if name is None and asked.is_side:
            text = asked.history.users_text[:_ORPHAN_CHARS]
            self._orphans.append(_Orphan(session.id, text, asked.received_at))
        return session

    def _adopted(self, asked: Asked) -> str | None:
        question = _excerpt(asked.history.question)
        for orphan in self._orphans:
            session = self._memory.sessions.get(orphan.session_id)
            is_late = asked.received_at - orphan.received_at > ORPHAN_WINDOW_S
            if session is None or session.turn or session.scope != asked.scope or is_late:
                continue
            if quotes(padded(orphan.text), question):
                return session.id
        return None

    def _kind(self, asked: Asked, found: Found, session: Session) -> Kind:
        if asked.is_side:
            return Kind.SIDE
        if session.turn == 0:
            return Kind.NEW if session.parent_id is None else Kind.SUB_AGENT
        same = self._same(asked, session)
        if same is not None:
            if same.ran_at(asked.received_at) and not asked.hints.is_retry:
                return Kind.PARALLEL
            is_answered = same.standing is Standing.SERVED and found.evidence is not Evidence.RETRY
            return Kind.REGENERATES if is_answered else Kind.REPEATS
        if found.parent is None:
            return self._kind_without_parent(asked, found, session)
        if self._is_said_only(asked, found):
            return Kind.COMPACTED
        return self._kind_after(asked, found.parent, found.base)

    def _kind_without_parent(self, asked: Asked, found: Found, session: Session) -> Kind:
        if found.base is not None:  # the answer it goes on from was cut off
            return Kind.CONTINUES
        if any(group.ran_at(asked.received_at) for group in self._mains(session)):
            return Kind.PARALLEL
        return Kind.COMPACTED if asked.history.has_answers else Kind.EDITS

    def _kind_after(self, asked: Asked, parent: Group, base: Hit | None) -> Kind:
        """Among those that go on from the same answer."""
        if base is not None and base.group is not parent:
            return Kind.CONTINUES
        others = [one for one in (parent.after or {}).values() if one.kind is not Kind.SIDE]
        others = [one for one in others if one.session is parent.session]
        if any(one.ran_at(asked.received_at) for one in others):
            return Kind.PARALLEL
        is_taken = any(one.standing is Standing.SERVED for one in others)
        return Kind.EDITS if is_taken else Kind.CONTINUES

    def _is_said_only(self, asked: Asked, found: Found) -> bool:
        """Whether the parent's answer stands in the history, but not what was before it."""
        if found.base is None or found.base.group is not found.parent:
            return False
        parent, said = found.base.group, asked.history.said
        if found.base.at < 0 or parent.said is None:
            return False
        one = said[found.base.at]
        return one.key == parent.said and one.end != parent.answered

    def _turn(self, asked: Asked, found: Found, session: Session, kind: Kind) -> int:
        if kind is Kind.SIDE:
            return max(1, session.turn)
        if kind in (Kind.REGENERATES, Kind.REPEATS):
            same = self._same(asked, session)
            assert same is not None
            return same.turn
        if found.base is not None:
            return found.base.group.turn + asked.history.turns_after(found.base.at)
        if kind is Kind.COMPACTED:
            return session.turn + _ends_in_users(asked.history)
        return max(1, asked.history.turns_after(-1))

    def _same(self, asked: Asked, session: Session) -> Group | None:
        """The latest group of the session that asked the same."""
        for group in self._memory.asked.latest(asked.history.end):
            if group.session is session and group.kind is not Kind.SIDE:
                return group
        return None

    def _note_repeated(self, asked: Asked, session: Session) -> None:
        for group in self._memory.asked.latest(asked.history.end):
            if group.session is session:
                group.is_repeated = True

    def _mains(self, session: Session) -> Iterable[Group]:
        latest = self._memory.groups.get(session.last_asked or "")
        return () if latest is None else (latest,)

    def _keep(
        self,
        asked: Asked,
        session: Session,
        parent_id: str | None,
        turn: int,
        kind: Kind,
        key: bytes | None = None,
    ) -> None:
        history, hints = asked.history, asked.hints
        session.user = hints.user or session.user
        session.cache_key = hints.cache_key or session.cache_key
        self._memory.session(session.id, session.scope)  # now the latest of use
        if kind is not Kind.SIDE:
            session.turn, session.last_asked = turn, asked.group_id
            session.question = _excerpt(history.question)
            session.opening = session.opening or session.question
        group = Group(
            asked.group_id,
            session,
            parent_id,
            turn,
            kind,
            history.end if key is None else key,
            history.system,
            asked.size,
            asked.received_at,
            text=asked.text,
        )
        self._memory.add(group)


def _name_of(asked: Asked) -> str | None:
    """The id of the session that the request names."""
    named = asked.hints.session
    return _session_id(asked.scope, named) if named else None


@lru_cache(1024)
def _session_id(scope: str, name: str) -> str:
    """The same for the same name, however long ago it was."""
    return blake2b(f"{scope}\0{name}".encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _excerpt(text: str) -> str:
    return text.strip()[:EXCERPT_CHARS]


def _ends_in_users(history: History) -> bool:
    return bool(history.said) and history.said[-1].is_users
