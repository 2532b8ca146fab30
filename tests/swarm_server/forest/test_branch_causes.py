from __future__ import annotations

import pytest
from swarm_server.forest.tiny_tokenizer import (
    FULL,
    IDS_ONLY,
    PIECE,
    SPECIAL,
    START,
    decode,
    encode,
    prompt_of,
)

from fakevllm_server.forest.branch_causes import Cause, SessionCall, drift_metrics, find_causes
from fakevllm_server.forest.call_text_comparison import Vocabulary

SYSTEM = "system: be brief"
END = "<|im_end|>"


def make_call(
    prompt: str, response: str | list[int], group: str = "g", *, returned: bool = True
) -> SessionCall:
    ids = encode(response) if isinstance(response, str) else response
    return SessionCall("session", group, encode(prompt), ids, returned)


def cause_of(*calls: SessionCall, vocabulary: Vocabulary | None = FULL) -> Cause:
    """Return the cause of the last call."""
    return find_causes(calls, vocabulary)[-1]


def call_with_history(response: str | list[int], *history: str) -> SessionCall:
    return make_call(prompt_of(SYSTEM, "user: hi", *history), response)


def test_the_first_call_of_each_session_is_first() -> None:
    calls = [SessionCall(session, "g", [1], [2]) for session in "ab"]
    assert find_causes(calls) == [Cause.FIRST, Cause.FIRST]


@pytest.mark.parametrize("vocabulary", [FULL, IDS_ONLY])
def test_a_next_turn_extends(vocabulary: Vocabulary) -> None:
    first = call_with_history(f"hello{END}")
    second = make_call(prompt_of(SYSTEM, "user: hi", "assistant: hello", "user: more"), "yes")
    assert cause_of(first, second, vocabulary=vocabulary) is Cause.EXTENDS


def test_a_truncated_response_is_extended_by_the_template_that_closes_it() -> None:
    first = call_with_history("hel")
    second = make_call(prompt_of(SYSTEM, "user: hi", "assistant: hel", "user: more"), "yes")
    assert cause_of(first, second) is Cause.EXTENDS


def test_the_same_prompt_in_one_group_is_a_sibling_and_in_another_regenerated() -> None:
    calls = [
        make_call(prompt_of(SYSTEM), "a", "g"),
        make_call(prompt_of(SYSTEM), "b", "g", returned=False),
    ]
    later = make_call(prompt_of(SYSTEM), "c", "h")
    assert find_causes([*calls, later]) == [Cause.FIRST, Cause.SIBLING, Cause.REGENERATED]


def test_a_response_that_the_app_never_received_cannot_be_extended() -> None:
    loser = make_call(prompt_of(SYSTEM, "user: hi"), f"no{END}", returned=False)
    later = make_call(prompt_of(SYSTEM, "user: hi", "assistant: no", "user: more"), "yes")
    assert cause_of(loser, later) is Cause.UNKNOWN


def test_a_call_extends_an_earlier_call_that_is_not_the_newest() -> None:
    winner = make_call(prompt_of(SYSTEM, "user: hi"), f"yes{END}")
    side = make_call(prompt_of("system: name this chat", "user: the chat is hi"), "greeting")
    later = make_call(prompt_of(SYSTEM, "user: hi", "assistant: yes", "user: more"), "sure")
    assert find_causes([winner, side, later], FULL) == [Cause.FIRST, Cause.UNRELATED, Cause.EXTENDS]


def test_another_question_after_the_same_answer_is_a_fork() -> None:
    first = call_with_history(f"hello{END}")
    history = ("assistant: hello",)
    second = call_with_history(f"fine{END}", *history, "user: how are you")
    third = call_with_history("no", *history, "user: go away")
    assert cause_of(first, second, third) is Cause.FORKED


def test_the_same_text_in_other_ids_is_retokenised() -> None:
    sampled = [PIECE + 1, PIECE + 2, *encode(f" it{END}")]
    assert decode(sampled) == f"having it{END}"
    first = call_with_history(sampled)
    second = call_with_history("yes", "assistant: having it", "user: more")
    assert cause_of(first, second) is Cause.RETOKENISED


def test_drift_from_a_longer_call_is_found_even_if_a_newer_call_is_extended() -> None:
    first = call_with_history(f"hello{END}")
    sampled = [PIECE + 1, PIECE + 2, *encode(END)]
    second = call_with_history(sampled, "assistant: hello", "user: more")
    again = make_call(prompt_of(SYSTEM, "user: hi"), f"hello{END}", "h")
    later = ("assistant: hello", "user: more", "assistant: having", "user: last")
    assert cause_of(first, second, again, call_with_history("yes", *later)) is Cause.RETOKENISED


def test_another_end_token_is_special_tokens() -> None:
    first = call_with_history([*encode("hello"), 3])
    second = call_with_history("yes", "assistant: hello", "user: more")
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
    first = call_with_history(f"  hello\n\n{END}")
    second = call_with_history("yes", "assistant: hello", "user: more")
    assert cause_of(first, second) is Cause.TRIMMED


def test_white_space_lost_inside_a_message_is_not_trimming() -> None:
    first = call_with_history(f"hello  there{END}")
    second = call_with_history("yes", "assistant: hello there", "user: more")
    assert cause_of(first, second) is Cause.UNKNOWN


@pytest.mark.parametrize(
    "rendered",
    [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        '<tool_call>{"arguments":{"b":2,"a":1},"name":"add"}</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}\n</tool_call>',
    ],
)
def test_a_tool_call_in_another_format_is_rerendered(rendered: str) -> None:
    first = call_with_history(
        f'Sure.<tool_call>{{"name":"add", "arguments":{{"a":1,"b":2}}}}</tool_call>{END}'
    )
    second = call_with_history("3", f"assistant: Sure.\n{rendered}", "tool: 3")
    assert cause_of(first, second) is Cause.TOOL_CALL_RERENDERED


def test_a_tool_call_with_other_arguments_is_not_the_same() -> None:
    first = call_with_history(f'<tool_call>{{"name":"add","arguments":{{"a":1}}}}</tool_call>{END}')
    other = 'assistant: <tool_call>{"name":"add","arguments":{"a":2}}</tool_call>'
    assert cause_of(first, call_with_history("3", other, "tool: 3")) is Cause.UNKNOWN


def test_a_tool_call_that_is_not_json_is_compared_unchanged() -> None:
    first = call_with_history(f"<tool_call>[[[</tool_call>{END}")
    second = call_with_history("3", "assistant: <tool_call>[ [[</tool_call>", "user: what")
    assert cause_of(first, second) is Cause.UNKNOWN


def test_a_removed_thought_is_stripped() -> None:
    first = call_with_history(f"<think>\nhm\n</think>\n\nhello{END}")
    second = call_with_history("yes", "assistant: hello", "user: more")
    assert cause_of(first, second) is Cause.THINKING_STRIPPED


def test_a_removed_thought_that_began_in_the_prompt_is_stripped() -> None:
    first = make_call(prompt_of(SYSTEM, "user: hi") + "<think>\n", f"hm\n</think>\n\nhello{END}")
    prompt = prompt_of(SYSTEM, "user: hi", "assistant: hello", "user: more") + "<think>\n"
    assert cause_of(first, make_call(prompt, "yes")) is Cause.THINKING_STRIPPED


def test_a_removed_truncated_thought_is_stripped() -> None:
    first = call_with_history("<think>\nhm, let me")
    second = call_with_history("yes", "assistant: ", "user: more")
    assert cause_of(first, second) is Cause.THINKING_STRIPPED


def test_a_removed_thought_of_an_earlier_turn_is_stripped() -> None:
    first = call_with_history(f"<think>a</think>one{END}")
    second = call_with_history(f"<think>b</think>two{END}", "assistant: one", "user: next")
    third = call_with_history("3", "assistant: one", "user: next", "assistant: two", "user: last")
    assert find_causes([first, second, third], FULL)[1:] == [Cause.THINKING_STRIPPED] * 2


HISTORY = ("assistant: one", "user: two", "assistant: three", "user: four")


def test_messages_removed_from_the_middle_are_compaction() -> None:
    first = call_with_history(f"five{END}", *HISTORY)
    later = make_call(prompt_of(SYSTEM, *HISTORY[2:], "assistant: five", "user: six"), "seven")
    assert cause_of(first, later) is Cause.COMPACTED


def test_a_summary_before_kept_messages_is_compaction() -> None:
    first = call_with_history(f"five{END}", *HISTORY)
    summary = "user: so far we said one and two"
    later = make_call(
        prompt_of(SYSTEM, summary, *HISTORY[2:], "assistant: five", "user: six"), "seven"
    )
    assert cause_of(first, later) is Cause.COMPACTED


def test_a_summary_that_keeps_no_message_is_unknown() -> None:
    first = call_with_history(f"five{END}", *HISTORY)
    assert cause_of(first, make_call(prompt_of(SYSTEM, "user: a summary"), "x")) is Cause.UNKNOWN


def test_an_edited_message_in_a_kept_history_is_an_edit() -> None:
    first = call_with_history(f"five{END}", *HISTORY)
    edited = ("assistant: one", "user: TWO", *HISTORY[2:], "assistant: five", "user: six")
    assert cause_of(first, call_with_history("seven", *edited)) is Cause.APP_EDIT


def test_tool_results_in_another_order_are_an_edit() -> None:
    results = ("assistant: calls", "tool: a", "tool: b")
    first = call_with_history(f"five{END}", *results)
    reordered = ("assistant: calls", "tool: b", "tool: a", "assistant: five", "user: six")
    assert cause_of(first, call_with_history("seven", *reordered)) is Cause.APP_EDIT


def test_another_system_prompt_before_the_same_history_is_its_own_cause() -> None:
    first = call_with_history(f"five{END}", *HISTORY)
    later = make_call(
        prompt_of("system: be long", "user: hi", *HISTORY, "assistant: five", "user: six"), "x"
    )
    assert cause_of(first, later) is Cause.OTHER_SYSTEM_PROMPT


def test_ids_alone_prove_no_cause_of_drift() -> None:
    first = call_with_history(f"<think>\nhm\n</think>\n\nhello{END}")
    second = call_with_history("yes", "assistant: hello", "user: more")
    assert cause_of(first, second, vocabulary=IDS_ONLY) is Cause.UNKNOWN
    edited = call_with_history("no", "assistant: other", "user: more")
    starts_only = Vocabulary(message_start=START)
    assert cause_of(second, edited, vocabulary=starts_only) is Cause.UNKNOWN


def test_a_response_that_ends_inside_a_character_is_compared_up_to_that_character() -> None:
    half = 3
    known = Vocabulary(
        lambda ids: decode([0xFFFD + 10 if token == half else token for token in ids]),
        frozenset(SPECIAL),
        START,
    )
    first = call_with_history([PIECE + 1, PIECE + 2, half])
    second = call_with_history("yes", "assistant: having", "user: more")
    assert cause_of(first, second, vocabulary=known) is Cause.RETOKENISED


def test_the_drift_rate_is_the_share_of_calls_that_are_not_first() -> None:
    causes = [Cause.FIRST, Cause.EXTENDS, Cause.SIBLING, Cause.TRIMMED, Cause.UNKNOWN]
    assert drift_metrics(causes) == {
        "branch_first": 1.0,
        "branch_extends": 1.0,
        "branch_sibling": 1.0,
        "branch_trimmed": 1.0,
        "branch_unknown": 1.0,
        "drift_rate": 0.5,
    }


def test_without_later_calls_there_is_no_drift_rate() -> None:
    assert drift_metrics(find_causes([])) == {}
