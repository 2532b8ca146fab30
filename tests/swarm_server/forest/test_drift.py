from __future__ import annotations

import pytest
from swarm_server.forest.tiny_tokenizer import (
    FULL,
    IDS_ONLY,
    PIECE,
    SPECIAL,
    START,
    asked,
    decode,
    encode,
)

from fakevllm_server.forest.drift import Cause, SessionCall, causes, drift_metrics
from fakevllm_server.forest.history import Vocabulary

SYSTEM = "system: be brief"
END = "<|im_end|>"


def made(
    prompt: str, response: str | list[int], group: str = "g", *, returned: bool = True
) -> SessionCall:
    ids = encode(response) if isinstance(response, str) else response
    return SessionCall("session", group, encode(prompt), ids, returned)


def cause_of(*calls: SessionCall, vocabulary: Vocabulary | None = FULL) -> Cause:
    """Of the last."""
    return causes(calls, vocabulary)[-1]


def answered(response: str | list[int], *history: str) -> SessionCall:
    return made(asked(SYSTEM, "user: hi", *history), response)


def test_the_first_call_of_each_session_is_first() -> None:
    calls = [SessionCall(session, "g", [1], [2]) for session in "ab"]
    assert causes(calls) == [Cause.FIRST, Cause.FIRST]


@pytest.mark.parametrize("vocabulary", [FULL, IDS_ONLY])
def test_a_next_turn_extends(vocabulary: Vocabulary) -> None:
    first = answered(f"hello{END}")
    second = made(asked(SYSTEM, "user: hi", "assistant: hello", "user: more"), "yes")
    assert cause_of(first, second, vocabulary=vocabulary) is Cause.EXTENDS


def test_a_response_cut_short_is_extended_by_the_template_that_closes_it() -> None:
    first = answered("hel")
    second = made(asked(SYSTEM, "user: hi", "assistant: hel", "user: more"), "yes")
    assert cause_of(first, second) is Cause.EXTENDS


def test_the_same_prompt_in_one_group_is_a_sibling_and_in_another_regenerated() -> None:
    calls = [made(asked(SYSTEM), "a", "g"), made(asked(SYSTEM), "b", "g", returned=False)]
    later = made(asked(SYSTEM), "c", "h")
    assert causes([*calls, later]) == [Cause.FIRST, Cause.SIBLING, Cause.REGENERATED]


def test_a_response_the_app_never_saw_cannot_be_extended() -> None:
    loser = made(asked(SYSTEM, "user: hi"), f"no{END}", returned=False)
    later = made(asked(SYSTEM, "user: hi", "assistant: no", "user: more"), "yes")
    assert cause_of(loser, later) is Cause.UNKNOWN


def test_the_call_that_is_extended_counts_and_not_the_newest() -> None:
    winner = made(asked(SYSTEM, "user: hi"), f"yes{END}")
    side = made(asked("system: name this chat", "user: the chat is hi"), "greeting")
    later = made(asked(SYSTEM, "user: hi", "assistant: yes", "user: more"), "sure")
    assert causes([winner, side, later], FULL) == [Cause.FIRST, Cause.UNRELATED, Cause.EXTENDS]


def test_another_question_after_the_same_answer_is_a_fork() -> None:
    first = answered(f"hello{END}")
    history = ("assistant: hello",)
    second = answered(f"fine{END}", *history, "user: how are you")
    third = answered("no", *history, "user: go away")
    assert cause_of(first, second, third) is Cause.FORKED


def test_the_same_text_in_other_ids_is_retokenised() -> None:
    sampled = [PIECE + 1, PIECE + 2, *encode(f" it{END}")]
    assert decode(sampled) == f"having it{END}"
    first = answered(sampled)
    second = answered("yes", "assistant: having it", "user: more")
    assert cause_of(first, second) is Cause.RETOKENISED


def test_drift_from_a_longer_call_is_seen_though_a_newer_one_is_extended() -> None:
    first = answered(f"hello{END}")
    sampled = [PIECE + 1, PIECE + 2, *encode(END)]
    second = answered(sampled, "assistant: hello", "user: more")
    again = made(asked(SYSTEM, "user: hi"), f"hello{END}", "h")
    later = ("assistant: hello", "user: more", "assistant: having", "user: last")
    assert cause_of(first, second, again, answered("yes", *later)) is Cause.RETOKENISED


def test_another_end_token_is_special_tokens() -> None:
    first = answered([*encode("hello"), 3])
    second = answered("yes", "assistant: hello", "user: more")
    known = Vocabulary(
        lambda ids: (
            decode([token for token in ids if token != 3])
            if 3 not in ids
            else decode([token for token in ids if token != 3]) + "<|endoftext|>"
        ),
        frozenset({*SPECIAL, 3}),
        START,
    )
    assert cause_of(first, second, vocabulary=known) is Cause.SPECIAL_TOKENS


def test_white_space_lost_at_the_edge_of_a_message_is_trimmed() -> None:
    first = answered(f"  hello\n\n{END}")
    second = answered("yes", "assistant: hello", "user: more")
    assert cause_of(first, second) is Cause.TRIMMED


def test_white_space_lost_inside_a_message_is_not_trimming() -> None:
    first = answered(f"hello  there{END}")
    second = answered("yes", "assistant: hello there", "user: more")
    assert cause_of(first, second) is Cause.UNKNOWN


@pytest.mark.parametrize(
    "rendered",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        '<tool_call>{"arguments":{"b":2,"a":1},"name":"add"}</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}\n</tool_call>',
    ],
)
def test_a_tool_call_in_another_spelling_is_rerendered(rendered: str) -> None:
    first = answered(
        f'Sure.<tool_call>{{"name":"add", "arguments":{{"a":1,"b":2}}}}</tool_call>{END}'
    )
    second = answered("3", f"assistant: Sure.\n{rendered}", "tool: 3")
    assert cause_of(first, second) is Cause.TOOL_CALL_RERENDERED


def test_a_tool_call_with_other_arguments_is_not_the_same() -> None:
    first = answered(f'<tool_call>{{"name":"add","arguments":{{"a":1}}}}</tool_call>{END}')
    other = 'assistant: <tool_call>{"name":"add","arguments":{"a":2}}</tool_call>'
    assert cause_of(first, answered("3", other, "tool: 3")) is Cause.UNKNOWN


def test_a_tool_call_that_is_no_json_is_compared_as_it_stands() -> None:
    first = answered(f"<tool_call>[[[</tool_call>{END}")
    second = answered("3", "assistant: <tool_call>[ [[</tool_call>", "user: what")
    assert cause_of(first, second) is Cause.UNKNOWN


def test_a_thought_that_is_gone_is_stripped() -> None:
    first = answered(f"<think>\nhm\n</think>\n\nhello{END}")
    second = answered("yes", "assistant: hello", "user: more")
    assert cause_of(first, second) is Cause.THINKING_STRIPPED


def test_a_thought_that_began_in_the_prompt_is_stripped_too() -> None:
    first = made(asked(SYSTEM, "user: hi") + "<think>\n", f"hm\n</think>\n\nhello{END}")
    prompt = asked(SYSTEM, "user: hi", "assistant: hello", "user: more") + "<think>\n"
    assert cause_of(first, made(prompt, "yes")) is Cause.THINKING_STRIPPED


def test_a_thought_cut_short_is_stripped_too() -> None:
    first = answered("<think>\nhm, let me")
    second = answered("yes", "assistant: ", "user: more")
    assert cause_of(first, second) is Cause.THINKING_STRIPPED


def test_a_thought_of_an_earlier_turn_is_found_in_a_later_one() -> None:
    first = answered(f"<think>a</think>one{END}")
    second = answered(f"<think>b</think>two{END}", "assistant: one", "user: next")
    third = answered("3", "assistant: one", "user: next", "assistant: two", "user: last")
    assert causes([first, second, third], FULL)[1:] == [Cause.THINKING_STRIPPED] * 2


HISTORY = ("assistant: one", "user: two", "assistant: three", "user: four")


def test_messages_lost_from_the_middle_are_compaction() -> None:
    first = answered(f"five{END}", *HISTORY)
    later = made(asked(SYSTEM, *HISTORY[2:], "assistant: five", "user: six"), "seven")
    assert cause_of(first, later) is Cause.COMPACTED


def test_a_summary_before_kept_messages_is_compaction() -> None:
    first = answered(f"five{END}", *HISTORY)
    summary = "user: so far we said one and two"
    later = made(asked(SYSTEM, summary, *HISTORY[2:], "assistant: five", "user: six"), "seven")
    assert cause_of(first, later) is Cause.COMPACTED


def test_a_summary_that_leaves_nothing_is_unknown() -> None:
    first = answered(f"five{END}", *HISTORY)
    assert cause_of(first, made(asked(SYSTEM, "user: a summary"), "x")) is Cause.UNKNOWN


def test_an_edited_message_in_a_kept_history_is_an_edit() -> None:
    first = answered(f"five{END}", *HISTORY)
    edited = ("assistant: one", "user: TWO", *HISTORY[2:], "assistant: five", "user: six")
    assert cause_of(first, answered("seven", *edited)) is Cause.APP_EDIT


def test_tool_results_in_another_order_are_an_edit() -> None:
    results = ("assistant: calls", "tool: a", "tool: b")
    first = answered(f"five{END}", *results)
    turned = ("assistant: calls", "tool: b", "tool: a", "assistant: five", "user: six")
    assert cause_of(first, answered("seven", *turned)) is Cause.APP_EDIT


def test_another_system_prompt_over_the_same_history_is_told_as_such() -> None:
    first = answered(f"five{END}", *HISTORY)
    later = made(
        asked("system: be long", "user: hi", *HISTORY, "assistant: five", "user: six"), "x"
    )
    assert cause_of(first, later) is Cause.OTHER_SYSTEM_PROMPT


def test_ids_alone_prove_no_cause_of_drift() -> None:
    first = answered(f"<think>\nhm\n</think>\n\nhello{END}")
    second = answered("yes", "assistant: hello", "user: more")
    assert cause_of(first, second, vocabulary=IDS_ONLY) is Cause.UNKNOWN
    edited = answered("no", "assistant: other", "user: more")
    starts_only = Vocabulary(message_start=START)
    assert cause_of(second, edited, vocabulary=starts_only) is Cause.UNKNOWN


def test_a_response_that_ends_inside_a_character_is_compared_up_to_it() -> None:
    half = 3
    known = Vocabulary(
        lambda ids: decode([0xFFFD + 10 if token == half else token for token in ids]),
        frozenset(SPECIAL),
        START,
    )
    first = answered([PIECE + 1, PIECE + 2, half])
    second = answered("yes", "assistant: having", "user: more")
    assert cause_of(first, second, vocabulary=known) is Cause.RETOKENISED


def test_drift_is_counted_against_the_calls_that_came_after_another() -> None:
    found = [Cause.FIRST, Cause.EXTENDS, Cause.SIBLING, Cause.TRIMMED, Cause.UNKNOWN]
    assert drift_metrics(found) == {
        "branch_first": 1.0,
        "branch_extends": 1.0,
        "branch_sibling": 1.0,
        "branch_trimmed": 1.0,
        "branch_unknown": 1.0,
        "drift_rate": 0.5,
    }


def test_calls_of_which_none_is_later_have_no_share_that_drifted() -> None:
    assert drift_metrics(causes([])) == {}
