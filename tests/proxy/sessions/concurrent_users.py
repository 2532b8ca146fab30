"""Many users at once: copies of the recorded conversations, interleaved at random and placed."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from fakevllm.sessions.client_session_ids import Hints, hints_of
from fakevllm.sessions.tree import SessionTree
from fakevllm.sessions.types import IncomingRequest, Place
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.formats.registry import ADAPTERS
from tests.proxy.sessions.recordings import Json, Recorded

IDENTIFYING_HEADERS = (
    *(b"x-session-id", b"x-session-affinity", b"x-parent-session-id"),
    *(b"x-openwebui-chat-id", b"x-openwebui-user-id"),
)
SCOPE = "0a1b2c3d"
NUM_CONCURRENT = 40
_IDS = ("id", "tool_call_id", "call_id")
_MIN_OPENING_CHARS = 8
"""An opening is changed only if it has at least this number of characters. It is then changed in
every quote of it as well."""


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """A request and its place in the tree."""

    recorded: Recorded
    group_id: str
    place: Place


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of a conversation for one user.

    It has its own answers and call ids. Every second user has its own opening, if the recorded one
    is long enough.
    """

    name: str
    requests: list[Recorded]

    @property
    def opening(self) -> str:
        return opening_of(self.requests)

    @property
    def answers(self) -> set[str]:
        return {_text(one.answer) for one in self.requests} - {""}


def copies(sessions: Sequence[Sequence[Recorded]], num_users: int) -> list[Copy]:
    return [
        Copy(f"{session[0].session}#{user}", _own(session, f"{number}.{user}", bool(user % 2)))
        for number, session in enumerate(sessions)
        for user in range(num_users)
    ]


def _own(session: Sequence[Recorded], mark: str, changes_opening: bool) -> list[Recorded]:
    opening = opening_of(session)
    answers = {_text(one.answer) for one in session} - {""}
    changes_opening = changes_opening and len(opening) >= _MIN_OPENING_CHARS

    def own(value: Any, role: str = "") -> Any:
        if isinstance(value, list):
            return [own(item, role) for item in cast(list[Any], value)]
        if isinstance(value, dict):
            found = cast(Json, value)
            role = str(found.get("role", role))
            return {key: _own_id(key, found[key], mark) or own(found[key], role) for key in found}
        return reword(value, role) if isinstance(value, str) else value

    def reword(text: str, role: str) -> str:
        if role == "assistant" and text in answers:
            return f"{text} ({mark})"
        if role == "user":
            for answer in answers:
                text = text.replace(f"ASSISTANT: {answer}", f"ASSISTANT: {answer} ({mark})")
            if changes_opening:
                text = text.replace(opening, f"{opening} for {mark}")
        return text

    return [
        replace(one, body=own(one.body), answer=own(one.answer, "assistant")) for one in session
    ]


def with_counted_ids(copy: Copy) -> Copy:
    """Return the copy with the call ids of an engine that counts calls from 0 in each answer."""

    def counted(value: Any, key: str = "") -> Any:
        if isinstance(value, list):
            return [counted(item) for item in cast(list[Any], value)]
        if isinstance(value, dict):
            return {name: counted(one, name) for name, one in cast(Json, value).items()}
        return "call_0" if key in _IDS else value

    requests = [
        replace(one, body=counted(one.body), answer=counted(one.answer)) for one in copy.requests
    ]
    return Copy(copy.name, requests)


def _own_id(key: str, value: Any, mark: str) -> str | None:
    is_id = key in _IDS and isinstance(value, str)
    return f"{value}-{mark}" if is_id else None


def opening_of(session: Sequence[Recorded]) -> str:
    """Return the first question of the first main call."""
    for one in session:
        if not one.is_side:
            adapter = ADAPTERS[one.adapter]
            return adapter.opening(adapter.open(one.body, EngineInfo("m")).body)
    return ""


def _text(message: Json) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


class ConcurrentUsers:
    """Sends the requests of many conversations to one tree, interleaved at random."""

    def __init__(self, *, with_headers: bool, rng: random.Random) -> None:
        self.tree = SessionTree()
        self.placed: defaultdict[str, list[PlacedRequest]] = defaultdict(list)
        self._with_headers = with_headers
        self._rng = rng
        self._now = 1000.0
        self._num = 0

    def play(self, copies: Sequence[Copy]) -> None:
        """Send all requests, each conversation in its order, with NUM_CONCURRENT open at a time."""
        remaining = list(copies)
        self._rng.shuffle(remaining)
        waiting: dict[str, list[Recorded]] = {}
        late: list[tuple[str, Recorded]] = []
        while remaining or waiting:
            while remaining and len(waiting) < NUM_CONCURRENT:
                copy = remaining.pop()
                waiting[copy.name] = list(copy.requests)
            name = self._rng.choice(list(waiting))
            one = waiting[name].pop(0)
            if not waiting[name]:
                del waiting[name]
            group_id = self._request(name, one)
            if one.is_side:  # the client does not wait for the answer
                late.append((group_id, one))
            else:
                self._answer(group_id, one)
            if late and self._rng.random() < 0.5:
                self._answer(*late.pop(0))

    def _request(self, name: str, one: Recorded) -> str:
        self._num += 1
        self._now += 0.1 * self._rng.random()
        adapter = ADAPTERS[one.adapter]
        body = adapter.open(one.body, EngineInfo("m")).body
        prompt = "" if "messages" in body else adapter.question(body)
        history, prompt_hash = self.tree.history_of(body, prompt, SCOPE)
        request = IncomingRequest(
            group_id=f"g{self._num}",
            scope=SCOPE,
            history=history,
            received_at=self._now,
            size=len(str(one.body)),
            hints=self._hints(name, one),
            is_side=one.is_side,
            prompt_hash=prompt_hash,
        )
        place = self.tree.place(request)
        self.placed[name].append(PlacedRequest(one, request.group_id, place))
        return request.group_id

    def _answer(self, group_id: str, one: Recorded) -> None:
        self._now += 0.1 * self._rng.random()
        if one.is_failed:
            self.tree.failed(group_id, self._now)
        else:
            self.tree.served(group_id, one.answer, self._now)

    def _hints(self, name: str, one: Recorded) -> Hints:
        kept = {key: one.headers[key] for key in one.headers if key not in IDENTIFYING_HEADERS}
        if self._with_headers:
            user = b"#" + name.rpartition("#")[2].encode()
            named = {
                key: one.headers[key] + b"#" + user
                for key in one.headers
                if key in IDENTIFYING_HEADERS
            }
            kept |= named
        return hints_of(kept, one.body)
