"""Histories are equal if a client only rewrites their format."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.sessions.normalize import canonical_arguments, normalize_history, without
from tests.proxy.sessions.session_client import assistant, call, tool, user

Json = dict[str, Any]
LOOP = [
    user("hi"),
    assistant("", call("c1", '{"path": "a", "n": 1}')),
    tool("c1", "text"),
    assistant("Done."),
]


def history_key(*messages: Json, scope: str = "key") -> bytes:
    return normalize_history(messages, scope).key


@pytest.mark.parametrize(
    "changed",
    [
        assistant(None, call("c1", '{"path":"a","n":1}')),
        assistant("", call("other", '{"n": 1.0, "path": "a"}')),
        assistant(None, call("c1", '{"n":1e0,"path":"\\u0061"}')) | {"reasoning_content": "Hm"},
        {"content": [{"type": "text", "text": ""}], "role": "assistant"}
        | {"tool_calls": [call("c1", '{"path": "a", "n": 1}') | {"index": 0}]},
        assistant("<think>so</think>", call("c1", '{"path": "a", "n": 1}')),
    ],
)
def test_a_rewritten_tool_call_has_the_same_history(changed: Json) -> None:
    assert history_key(LOOP[0], changed, *LOOP[2:]) == history_key(*LOOP)


@pytest.mark.parametrize(
    "changed",
    [
        assistant("", call("c1", '{"path": "b", "n": 1}')),
        assistant("", call("c1", '{"path": "a", "n": 1}', name="write")),
        assistant("So", call("c1", '{"path": "a", "n": 1}')),
        assistant("", call("c1", '{"path": "a", "n": "1"}')),
        assistant(""),
        user(""),
    ],
)
def test_a_different_call_or_text_has_another_history(changed: Json) -> None:
    assert history_key(LOOP[0], changed, *LOOP[2:]) != history_key(*LOOP)


def test_parts_that_clients_insert_and_remove_do_not_change_the_key() -> None:
    cached = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    reminder = {"type": "text", "text": "<system-reminder>It is Monday</system-reminder>"}
    assert history_key(
        {"role": "system", "content": "Today is Monday"},
        {"role": "user", "content": [reminder, cached]},
        LOOP[1],
        LOOP[2] | {"name": "read"},
        {"role": "assistant", "content": ""},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm"},
                {"type": "text", "text": " Done.\n"},
            ],
            "refusal": None,
            "provider_specific_fields": {"x": 1},
        },
    ) == history_key(*LOOP)


def test_images_change_the_key_and_their_cache_control_does_not() -> None:
    def image_message(url: str, **more: Any) -> Json:
        part = {"type": "image_url", "image_url": {"url": url}} | more
        return {"role": "user", "content": [part, {"type": "text", "text": "colour?"}]}

    assert history_key(image_message("data:a")) == history_key(
        image_message("data:a", cache_control={"type": "ephemeral"})
    )
    assert history_key(image_message("data:a")) != history_key(image_message("data:b"))
    assert history_key(image_message("data:a")) != history_key(user("colour?"))


def test_histories_of_two_keys_are_never_equal() -> None:
    assert history_key(user("hi")) != history_key(user("hi"), scope="other")


def test_a_turn_begins_with_a_users_message() -> None:
    history = normalize_history(
        [
            user("one"),
            user("more of it"),
            assistant("", call("c1")),
            tool("c1", "text"),
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:a"}}]},
            assistant("Calling tools:\n[{'id': 'call_7', 'type': 'function'}]"),
            user("Observation:\n3"),
            assistant("There."),
            user("two"),
        ],
        "key",
    )
    assert history.turns_after(-1) == 2
    assert [history.turns_after(at) for at in (1, 6, 7)] == [1, 1, 1]
    assert history.messages[5].call_ids == ("call_7",)
    assert history.question == "two"
    looped = [user("one"), assistant("", call("c1")), tool("c1", "text")]
    assert normalize_history(looped, "key").question == "one"


def test_a_few_shot_example_is_no_turn() -> None:
    switch = "I switched to a new code base. Please don't consider the above files."
    files = "I have *added these files to the chat* so you can go ahead and edit them."
    example = [user("Change get_factorial()"), assistant("Here"), user(switch), assistant("Ok.")]
    history = normalize_history([*example, user(files), assistant("Ok"), user("my wish")], "key")
    assert history.turns_after(-1) == 1
    assert (history.question, history.user_text) == ("my wish", "my wish")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
MESSAGE_LIKE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "system"]) | ANYTHING,
        "content": ANYTHING,
        "tool_calls": ANYTHING | st.lists(st.fixed_dictionaries({"function": ANYTHING})),
        "function_call": ANYTHING,
        "tool_call_id": ANYTHING,
    },
)


@given(st.lists(MESSAGE_LIKE | ANYTHING))
def test_every_request_body_has_a_history(messages: list[Any]) -> None:
    assert normalize_history(messages, "key").key == normalize_history(messages, "key").key


@pytest.mark.parametrize(
    "arguments", ["{", "[" * 5000, '{"a": ' * 600 + "1" + "}" * 600, "\ud800", None, 7, ["a"]]
)
def test_arguments_that_are_not_json_are_kept_unchanged(arguments: object) -> None:
    assert canonical_arguments(arguments)


@pytest.mark.parametrize("begin", ["<think>", "<system-reminder>", '<details type="reasoning"'])
def test_unclosed_marks_are_scanned_in_linear_time(begin: str) -> None:
    """The text has a megabyte of marks, for which a quadratic scan would take too long."""
    text = begin * (1_000_000 // len(begin))
    history = normalize_history([{"role": "assistant", "content": text}], "")
    assert len(history.messages) == 1


def test_repeated_announcements_of_examples_are_scanned_in_linear_time() -> None:
    """A scan of all earlier messages for each announcement would take too long."""
    messages = [user(f"I switched to a new code base. {at}") for at in range(40_000)]
    history = normalize_history([user("An example"), *messages, user("Mine")], "")
    assert [one.text for one in history.messages if one.is_from_user] == ["Mine"]


@pytest.mark.parametrize(
    "around",
    [
        "### Task:\nRespond to the user query.\n<context>\n{c}\n</context>\n\n{q}",
        "### Task:\nRespond to the user query.\n<context>{c}</context>\n"
        "<user_query>\n{q}\n</user_query>\n",
    ],
)
def test_a_question_has_the_same_key_with_and_without_inserted_context(
    around: str,
) -> None:
    question = around.format(c="<source id='1'>a text</source>", q="What is it about?")
    assert history_key(user(question), assistant("A text.")) == history_key(
        user("What is it about?"), assistant("A text.")
    )
    assert normalize_history([user(question)], "").question == "What is it about?"
    assert normalize_history([user("### Task:\nRespond to the user query <b>")], "").question


def test_text_between_marks_is_removed_and_the_rest_stays() -> None:
    marks = ("<think>", "</think>")
    assert without("<think>a</think>b<think>c</think>d<think>", *marks) == "bd<think>"
    assert without("plain </think>", *marks) == "plain </think>"
