"""Requests of any tree of conversations are found, also interleaved and rewritten."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fakevllm.sessions.client_session_ids import NO_HINTS, Hints
from fakevllm.sessions.types import Kind, Place
from tests.proxy.sessions.session_client import Json, SessionClient, assistant, call, tool, user

FEW_TEXTS = st.sampled_from(["hi", "go on", "why?", "4"])
"""Few texts, so that users often send equal messages."""
ARGUMENTS = st.dictionaries(
    st.sampled_from(["path", "n", "ä"]), st.integers(0, 3) | st.text(max_size=3), max_size=3
)
NUM_KEPT = 60


@dataclass(frozen=True)
class Answered:
    """A served answer, and the history of the app after it."""

    history: list[Json]
    group_id: str
    session_id: str
    parent_id: str | None
    turn: int
    is_call: bool


def rewritten(messages: list[Json], style: int) -> list[Json]:
    """Return the messages with the changes that clients make.

    Clients change spaces and the order of arguments, use None for empty text, send text as parts,
    add their own fields, and add a system prompt with the date.
    """
    messages = [_rewrite_message(message, style) for message in messages]
    return (
        [{"role": "system", "content": f"It is day {style}"}, *messages] if style % 2 else messages
    )


def _rewrite_message(message: Json, style: int) -> Json:
    again = dict(message)
    if style & 2 and again.get("content") is not None:
        again["content"] = [{"type": "text", "text": again["content"]}]
        if style & 4:
            again["content"][0]["cache_control"] = {"type": "ephemeral"}
    if message["role"] == "assistant" and not message.get("content"):
        again["content"] = "" if style & 4 else None
    if style & 8 and message["role"] == "assistant":
        again |= {"reasoning_content": "Hm.", "provider_specific_fields": {}}
    if "tool_calls" in message:
        again["tool_calls"] = [_rewrite_call(one, style) for one in message["tool_calls"]]
    return again


def _rewrite_call(one: Json, style: int) -> Json:
    value: dict[str, Any] = json.loads(one["function"]["arguments"])
    if style & 16:
        value = dict(reversed(value.items()))
    separators = (",", ":") if style & 2 else (", ", " : ")
    arguments = json.dumps(value, separators=separators, ensure_ascii=bool(style & 4))
    return one | {"function": {"arguments": arguments, "name": one["function"]["name"]}}


class Apps(RuleBasedStateMachine):
    """Apps without session names, whose answers all differ: every request must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.client = SessionClient()
        self.answered: list[Answered] = []
        self.open: list[tuple[str, Place, list[Json]]] = []
        self.num_answers = 0

    @rule(text=FEW_TEXTS, style=st.integers(0, 31))
    def opens(self, text: str, style: int) -> None:
        before = {place.session_id for _, place, _ in self.open}
        before |= {one.session_id for one in self.answered}
        group_id, place = self.client.request(rewritten([user(text)], style))
        assert place.session_id not in before
        assert (place.kind, place.turn, place.parent_id) == (Kind.NEW, 1, None)
        self.open.append((group_id, place, [user(text)]))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), is_call=st.booleans(), arguments=ARGUMENTS)
    def gets_an_answer(self, data: st.DataObject, is_call: bool, arguments: Json) -> None:
        at = data.draw(st.integers(0, len(self.open) - 1))
        group_id, place, request = self.open.pop(at)
        self.num_answers += 1
        if is_call:
            answer = assistant("", call(f"call_{self.num_answers}", json.dumps(arguments)))
        else:
            answer = assistant(f"Answer {self.num_answers}")
        self.client.answer(group_id, answer)
        self.answered.append(
            Answered(
                [*request, answer],
                group_id,
                place.session_id,
                place.parent_id,
                place.turn,
                is_call,
            )
        )

    @precondition(lambda self: self.open)
    @rule()
    def gets_none(self) -> None:
        self.client.fail(self.open.pop(0)[0])

    @precondition(lambda self: self.answered)
    @rule(data=st.data(), text=FEW_TEXTS, style=st.integers(0, 31))
    def continues(self, data: st.DataObject, text: str, style: int) -> None:
        """Continue from any answer. Continuing from an earlier answer is an edit."""
        at = data.draw(st.integers(0, len(self.answered) - 1))
        one = self.answered[at]
        next_message = (
            tool(one.history[-1]["tool_calls"][0]["id"], text) if one.is_call else user(text)
        )
        request = [*one.history, next_message]
        group_id, place = self.client.request(rewritten(request, style))
        assert place.session_id == one.session_id
        assert place.parent_id == one.group_id
        assert place.turn == one.turn + (not one.is_call)
        self.open.append((group_id, place, request))

    @precondition(lambda self: any(one.parent_id for one in self.answered))
    @rule(data=st.data(), style=st.integers(0, 31))
    def regenerates(self, data: st.DataObject, style: int) -> None:
        """Regenerate an answer. First requests are excluded: they would start a new session."""
        deep = [one for one in self.answered if one.parent_id]
        one = deep[data.draw(st.integers(0, len(deep) - 1))]
        request = one.history[:-1]
        group_id, place = self.client.request(rewritten(request, style))
        assert (place.session_id, place.parent_id) == (one.session_id, one.parent_id)
        assert place.turn == one.turn
        assert place.kind in (Kind.REGENERATES, Kind.PARALLEL, Kind.REPEATS)
        self.open.append((group_id, place, request))

    @invariant()
    def remembers_every_group(self) -> None:
        assert len(self.client.tree) == self.client.num


TestApps = Apps.TestCase
TestApps.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(FEW_TEXTS, FEW_TEXTS, st.booleans()), min_size=1, max_size=12))
def test_users_with_equal_conversations_have_separate_sessions(
    users: list[tuple[str, str, bool]],
) -> None:
    """Equal requests with equal answers cannot be told apart, but no session is lost or merged."""
    client = SessionClient()
    first = [client.turn([user(text)], "Yes.")[1] for text, _, _ in users]
    assert len({place.session_id for place in first}) == len(users)
    continued = [
        client.turn([user(text), assistant("Yes."), user(after)], "No.")[1]
        for text, after, stays in users
        if stays
    ]
    assert len({place.session_id for place in continued}) == len(continued)
    assert {place.session_id for place in continued} <= {place.session_id for place in first}
    assert all(place.turn == 2 for place in continued)


NAMES = st.sampled_from([NO_HINTS, Hints(session="s", is_header=True), Hints(user="u")])


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(FEW_TEXTS, st.integers(0, 4), NAMES, st.booleans(), st.booleans()),
        min_size=2 * NUM_KEPT,
        max_size=4 * NUM_KEPT,
    )
)
def test_the_memory_of_the_tree_is_bounded(
    requests: list[tuple[str, int, Hints, bool, bool]],
) -> None:
    client = SessionClient(NUM_KEPT)
    history: list[Json] = []
    for number, (text, depth, hints, is_side, is_answered) in enumerate(requests):
        history = [*history[-2 * depth :], user(text)] if depth else [user(text)]
        group_id, _ = client.request(history, hints, is_side=is_side)
        if is_answered:
            calls = assistant("", call(f"call_{number}"), call(f"also_{number}"))
            client.answer(group_id, calls, f"resp_{number}")
            history = [*history, calls]
        assert len(client.tree) <= NUM_KEPT
        # Keys of a group: one for its request, one for its answer, one for both, one per call,
        # one for the response id, one for the session, and one for the link to its parent.
        assert client.tree.num_keys <= 8 * NUM_KEPT


def test_sessions_that_are_not_continued_are_evicted() -> None:
    client = SessionClient(NUM_KEPT)
    for number in range(20 * NUM_KEPT):
        group_id, _ = client.request([user(f"hi {number}")])
        calls = [call(f"{name}_{number}", f'{{"n": {number}}}') for name in ("call", "also")]
        client.answer(group_id, assistant("", *calls), f"resp_{number}")
    assert len(client.tree) == NUM_KEPT
    assert client.tree.num_keys == 7 * NUM_KEPT


def test_an_answer_that_is_regenerated_often_does_not_grow_the_tree() -> None:
    client = SessionClient(NUM_KEPT)
    client.turn([user("hi")], "Hello")
    history = [user("hi"), assistant("Hello"), user("go on")]
    for number in range(12 * NUM_KEPT):
        _, place = client.turn(history, f"Try {number}")
        assert (place.parent_id, place.turn) == ("g1", 2)
    assert client.tree.num_keys <= 8 * NUM_KEPT


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300))
def test_a_conversation_that_continues_is_never_evicted(num_turns: int) -> None:
    client = SessionClient(2)
    history: list[Json] = []
    for number in range(num_turns):
        history.append(user("go on"))
        _, place = client.turn(history, f"Answer {number}")
        assert place.turn == number + 1
        history.append(assistant(f"Answer {number}"))
    assert len(client.tree) == min(2, num_turns)
