"""A client that sends requests and answers to a session tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fakevllm.sessions.client_session_ids import NO_HINTS, Hints
from fakevllm.sessions.tree import SessionTree
from fakevllm.sessions.types import IncomingRequest, Place

NAMED = Hints(session="ses_1", is_header=True)
LONG = "A summary of the whole conversation that is long enough to be unique to one session."

Json = dict[str, Any]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str | None, *calls: Json) -> Json:
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {})


def call(call_id: str, arguments: str = "{}", name: str = "read") -> Json:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def tool(call_id: str, text: str) -> Json:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


class SessionClient:
    """Sends requests to one tree, one per second."""

    def __init__(self, max_groups: int = 1000) -> None:
        self.tree = SessionTree(max_groups)
        self.now = 1000.0
        self.num = 0

    def request(
        self,
        messages: Iterable[Json] | str,
        hints: Hints = NO_HINTS,
        *,
        scope: str = "key",
        is_side: bool = False,
        size: int = 0,
    ) -> tuple[str, Place]:
        """Send a request without an answer; return its group id and its place.

        A text is sent as a prompt, a list as messages.
        """
        self.num += 1
        self.now += 1
        body: Json = {} if isinstance(messages, str) else {"messages": list(messages)}
        prompt = messages if isinstance(messages, str) else ""
        history, prompt_hash = self.tree.history_of(body, prompt, scope)
        request = IncomingRequest(
            group_id=f"g{self.num}",
            scope=scope,
            history=history,
            received_at=self.now,
            size=size,
            hints=hints,
            is_side=is_side,
            prompt_hash=prompt_hash,
        )
        return request.group_id, self.tree.place(request)

    def answer(self, group_id: str, message: Json | str, response_id: str | None = None) -> None:
        self.now += 1
        answer = assistant(message) if isinstance(message, str) else message
        self.tree.served(group_id, answer, self.now, response_id)

    def fail(self, group_id: str) -> None:
        self.now += 1
        self.tree.failed(group_id, self.now)

    def turn(
        self,
        messages: Iterable[Json] | str,
        message: Json | str,
        hints: Hints = NO_HINTS,
        *,
        is_side: bool = False,
        scope: str = "key",
    ) -> tuple[str, Place]:
        """Send a request and its answer; return its group id and its place."""
        group_id, place = self.request(messages, hints, is_side=is_side, scope=scope)
        self.answer(group_id, message)
        return group_id, place


def open_session(client: SessionClient, hints: Hints = NO_HINTS) -> tuple[list[Json], str, str]:
    """Send and answer a first request; return the history, session id and group id."""
    group, place = client.turn([user("hello there")], "Hi!", hints)
    return [user("hello there"), assistant("Hi!")], place.session_id, group
