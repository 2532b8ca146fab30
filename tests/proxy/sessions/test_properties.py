"""Any tree of conversations, however it is interleaved and written again, is found again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fakevllm.sessions.hints import NO_HINTS, Hints
from fakevllm.sessions.types import Kind, Place
from tests.proxy.sessions.talks import Json, Talk, assistant, call, tool, user

FEW_TEXTS = st.sampled_from(["hi", "go on", "why?", "4"])
"""Few, so that users say the same all the time."""
ARGUMENTS = st.dictionaries(
    st.sampled_from(["path", "n", "ä"]), st.integers(0, 3) | st.text(max_size=3), max_size=3
)
NUM_KEPT = 60


@dataclass(frozen=True)
class Answered:
    """A served answer, and all that its app holds when it got it."""

    history: list[Json]
    group_id: str
    session_id: str
    parent_id: str | None
    turn: int
    is_call: bool


def written_again(messages: list[Json], style: int) -> list[Json]:
    """As clients do: other spaces and order in arguments, other kinds of nothing, parts for text,
    fields of their own, a system prompt of the day."""
    told = [_again(message, style) for message in messages]
    return [{"role": "system", "content": f"It is day {style}"}, *told] if style % 2 else told


def _again(message: Json, style: int) -> Json:
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
        again["tool_calls"] = [_call_again(one, style) for one in message["tool_calls"]]
    return again


def _call_again(one: Json, style: int) -> Json:
    value: dict[str, Any] = json.loads(one["function"]["arguments"])
    if style & 16:
        value = dict(reversed(value.items()))
    separators = (",", ":") if style & 2 else (", ", " : ")
    arguments = json.dumps(value, separators=separators, ensure_ascii=bool(style & 4))
    return one | {"function": {"arguments": arguments, "name": one["function"]["name"]}}


class Apps(RuleBasedStateMachine):
    """Apps without a name, whose answers differ (a model samples): all must be found."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = Talk()
        self.answered: list[Answered] = []
        self.open: list[tuple[str, Place, list[Json]]] = []
        self.num_answers = 0

    @rule(text=FEW_TEXTS, style=st.integers(0, 31))
    def opens(self, text: str, style: int) -> None:
        before = {place.session_id for _, place, _ in self.open}
        before |= {one.session_id for one in self.answered}
        group_id, place = self.talk.ask(written_again([user(text)], style))
        assert place.session_id not in before
        assert (place.kind, place.turn, place.parent_id) == (Kind.NEW, 1, None)
        self.open.append((group_id, place, [user(text)]))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), is_call=st.booleans(), arguments=ARGUMENTS)
    def gets_an_answer(self, data: st.DataObject, is_call: bool, arguments: Json) -> None:
        at = data.draw(st.integers(0, len(self.open) - 1))
        group_id, place, asked = self.open.pop(at)
        self.num_answers += 1
        if is_call:
            told = assistant("", call(f"call_{self.num_answers}", json.dumps(arguments)))
        else:
            told = assistant(f"Answer {self.num_answers}")
        self.talk.answer(group_id, told)
        self.answered.append(
            Answered(
                [*asked, told], group_id, place.session_id, place.parent_id, place.turn, is_call
            )
        )

    @precondition(lambda self: self.open)
    @rule()
    def gets_none(self) -> None:
        self.talk.fail(self.open.pop(0)[0])

    @precondition(lambda self: self.answered)
    @rule(data=st.data(), text=FEW_TEXTS, style=st.integers(0, 31))
    def goes_on(self, data: st.DataObject, text: str, style: int) -> None:
        """From any answer: the last one, or an earlier one, which is an edit."""
        at = data.draw(st.integers(0, len(self.answered) - 1))
        one = self.answered[at]
        said = tool(one.history[-1]["tool_calls"][0]["id"], text) if one.is_call else user(text)
        asked = [*one.history, said]
        group_id, place = self.talk.ask(written_again(asked, style))
        assert place.session_id == one.session_id
        assert place.parent_id == one.group_id
        assert place.turn == one.turn + (not one.is_call)
        self.open.append((group_id, place, asked))

    @precondition(lambda self: any(one.parent_id for one in self.answered))
    @rule(data=st.data(), style=st.integers(0, 31))
    def asks_again(self, data: st.DataObject, style: int) -> None:
        """For another answer than an earlier one; an opening is another session's."""
        deep = [one for one in self.answered if one.parent_id]
        one = deep[data.draw(st.integers(0, len(deep) - 1))]
        asked = one.history[:-1]
        group_id, place = self.talk.ask(written_again(asked, style))
        assert (place.session_id, place.parent_id) == (one.session_id, one.parent_id)
        assert place.turn == one.turn
        assert place.kind in (Kind.REGENERATES, Kind.PARALLEL, Kind.REPEATS)
        self.open.append((group_id, place, asked))

    @invariant()
    def remembers_every_group(self) -> None:
        assert len(self.talk.tree) == self.talk.num


TestApps = Apps.TestCase
TestApps.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(FEW_TEXTS, FEW_TEXTS, st.booleans()), min_size=1, max_size=12))
def test_users_who_are_told_the_same_have_their_own_sessions_until_they_differ(
    users: list[tuple[str, str, bool]],
) -> None:
    """Same words, same answers: nobody can tell who is who, but nobody is lost or merged."""
    talk = Talk()
    first = [talk.turn([user(text)], "Yes.")[1] for text, _, _ in users]
    assert len({place.session_id for place in first}) == len(users)
    goes_on = [
        talk.turn([user(text), assistant("Yes."), user(after)], "No.")[1]
        for text, after, stays in users
        if stays
    ]
    assert len({place.session_id for place in goes_on}) == len(goes_on)
    assert {place.session_id for place in goes_on} <= {place.session_id for place in first}
    assert all(place.turn == 2 for place in goes_on)


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
    asked: list[tuple[str, int, Hints, bool, bool]],
) -> None:
    talk = Talk(NUM_KEPT)
    history: list[Json] = []
    for number, (text, depth, hints, is_side, is_answered) in enumerate(asked):
        history = [*history[-2 * depth :], user(text)] if depth else [user(text)]
        group_id, _ = talk.ask(history, hints, is_side=is_side)
        if is_answered:
            calls = assistant("", call(f"call_{number}"), call(f"also_{number}"))
            talk.answer(group_id, calls, f"resp_{number}")
            history = [*history, calls]
        assert len(talk.tree) <= NUM_KEPT
        # A group has a key for what it asked and for what it got, alone and with what it asked,
        # one a call, one a response id; a session, and a link to its parent.
        assert talk.tree.num_keys <= 8 * NUM_KEPT


def test_sessions_that_are_not_continued_are_evicted() -> None:
    talk = Talk(NUM_KEPT)
    for number in range(20 * NUM_KEPT):
        group_id, _ = talk.ask([user(f"hi {number}")])
        calls = [call(f"{name}_{number}", f'{{"n": {number}}}') for name in ("call", "also")]
        talk.answer(group_id, assistant("", *calls), f"resp_{number}")
    assert len(talk.tree) == NUM_KEPT
    assert talk.tree.num_keys == 7 * NUM_KEPT


def test_an_answer_that_is_regenerated_often_does_not_grow_the_tree() -> None:
    talk = Talk(NUM_KEPT)
    talk.turn([user("hi")], "Hello")
    history = [user("hi"), assistant("Hello"), user("go on")]
    for number in range(12 * NUM_KEPT):
        _, place = talk.turn(history, f"Try {number}")
        assert (place.parent_id, place.turn) == ("g1", 2)
    assert talk.tree.num_keys <= 8 * NUM_KEPT


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300))
def test_a_conversation_that_continues_is_never_evicted(num_turns: int) -> None:
    talk = Talk(2)
    history: list[Json] = []
    for number in range(num_turns):
        history.append(user("go on"))
        _, place = talk.turn(history, f"Answer {number}")
        assert place.turn == number + 1
        history.append(assistant(f"Answer {number}"))
    assert len(talk.tree) == min(2, num_turns)
