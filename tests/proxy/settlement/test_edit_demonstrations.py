"""An edit becomes a demonstration only with the ids of the recorded prompt, and nothing is
guessed."""

from __future__ import annotations

import pytest

from fakevllm.settlement.edit_demonstrations import (
    EditKept,
    RecordedAnswer,
    check_message,
    check_text,
    demonstrations,
    edited_response,
    tokenize_requests,
)
from fakevllm_adapters.protocol.packed_numbers import unpack_ids
from fakevllm_adapters.protocol.swarm import CapturedCall
from tests.proxy.ledger.ledger_cases import call

PROMPT, END, NEWLINE = [1, 2, 3], 90, 91
ANSWER = RecordedAnswer(PROMPT, [7, 8, END])


def rendered(*edit: int) -> list[list[int]]:
    """Return the ids of a conversation with an edit, and with another text, under a template that
    writes END and a line break after an answer."""
    return [[*PROMPT, *edit, END, NEWLINE], [*PROMPT, 50, END, NEWLINE]]


def test_the_response_ends_with_the_token_that_ended_the_answer() -> None:
    assert edited_response(ANSWER, rendered(4, 5)) == [4, 5, END]


def test_an_answer_that_was_cut_off_leaves_the_whole_end_of_the_template() -> None:
    cut = RecordedAnswer(PROMPT, [7, 8])
    assert edited_response(cut, rendered(4, 5)) == [4, 5, END, NEWLINE]


def test_a_token_of_the_text_that_equals_the_last_token_of_the_answer_does_not_end_the_edit() -> (
    None
):
    stopped_at_text = RecordedAnswer(PROMPT, [7, 4])
    assert edited_response(stopped_at_text, rendered(4, 5)) == [4, 5, END, NEWLINE]


def test_an_edit_with_the_token_that_ends_an_answer_is_kept() -> None:
    """A user may have typed the text of this token. No answer goes on after it."""
    with pytest.raises(EditKept, match=r"^end_token"):
        edited_response(ANSWER, rendered(END, 5))


@pytest.mark.parametrize("ids", [[1, 2, 9, 4], [1, 2], PROMPT])
def test_an_edit_that_is_rendered_with_another_prompt_is_kept(ids: list[int]) -> None:
    with pytest.raises(EditKept, match=r"^chat_template: "):
        edited_response(ANSWER, [ids, ids])


def test_a_text_completion_keeps_all_its_ids() -> None:
    assert edited_response(ANSWER, [[*PROMPT, 4, END, 5]]) == [4, END, 5]


def test_an_edit_with_the_tokens_of_the_answer_is_kept() -> None:
    with pytest.raises(EditKept, match=r"^same_text"):
        edited_response(RecordedAnswer(PROMPT, [4, END, NEWLINE]), rendered(4))


def test_a_chat_is_rendered_with_its_tools_and_without_a_generation_prompt() -> None:
    request = {
        "model": "m",
        "messages": [{"role": "user", "content": "2+2?"}],
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "temperature": 0.5,
        "tool_choice": None,
    }
    first, second = tokenize_requests(request, "4")
    assert first == {
        "messages": [
            {"role": "user", "content": "2+2?"},
            {"role": "assistant", "content": "4"},
        ],
        "add_generation_prompt": False,
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    last = second["messages"][-1]
    assert (
        second
        != first
        == second | {"messages": [*second["messages"][:-1], last | {"content": "4"}]}
    )


def test_an_answer_that_continues_a_message_is_rendered_in_this_message() -> None:
    """Otherwise the tokens between two messages would be trained as a part of the edit."""
    user, begin = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}
    request = {"messages": [user, begin], "continue_final_message": True}
    first, second = tokenize_requests(request, " 4.")
    assert first["messages"] == [user, {"role": "assistant", "content": "It is 4."}]
    assert second["messages"][-1]["content"] == "It isx"
    for content in (None, [{"type": "text", "text": "It is"}]):
        with pytest.raises(EditKept, match=r"^no_prompt"):
            tokenize_requests(request | {"messages": [user, begin | {"content": content}]}, " 4.")


def test_an_answer_without_a_generation_prompt_is_kept() -> None:
    request = {"messages": [{"role": "user", "content": "2+2?"}], "add_generation_prompt": False}
    with pytest.raises(EditKept, match=r"^no_prompt"):
        tokenize_requests(request, "4")


@pytest.mark.parametrize("edit", ["4", "2 x", "2 x ", "x", "x is y", " "])
def test_the_other_text_begins_and_ends_with_another_letter_than_the_edit(edit: str) -> None:
    """Otherwise the first or the last words of the edit would count as a part of the template."""
    first, second = tokenize_requests({"messages": []}, edit)
    short, other = (body["messages"][-1]["content"] for body in (first, second))
    letters = edit.strip() or edit
    assert short == edit and other[0] != letters[0] and other[-1] != letters[-1]


def test_an_edit_behind_tokens_that_the_answer_does_not_have_is_kept() -> None:
    """Some templates write an empty block of reasoning before an answer without reasoning."""
    block = [60, 61]
    texts = [[*PROMPT, *block, *text, END, NEWLINE] for text in ([4, 5], [50])]
    with pytest.raises(EditKept, match=r"^chat_template"):
        edited_response(ANSWER, texts)
    same = RecordedAnswer(PROMPT, [*block, 7, END])
    assert edited_response(same, texts) == [*block, 4, 5, END]


def test_a_text_completion_is_rendered_once_and_other_prompts_are_kept() -> None:
    assert tokenize_requests({"prompt": "2+2="}, "4") == [{"prompt": "2+2=4"}]
    bare = {"prompt": "2+2=", "add_special_tokens": False}
    assert tokenize_requests(bare, "4") == [{"prompt": "2+2=4", "add_special_tokens": False}]
    with pytest.raises(EditKept, match=r"^no_prompt"):
        tokenize_requests({"prompt": [1, 2]}, "4")


@pytest.mark.parametrize(
    ("edited", "reason"),
    [(None, "forgotten"), ("4", "same_text"), ("mail [redacted: email]", "redacted")],
)
def test_a_text_that_cannot_be_trained_has_a_reason(edited: str | None, reason: str) -> None:
    with pytest.raises(EditKept, match=f"^{reason}"):
        check_text(edited, "4")
    assert check_text("5", "4") == "5"


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([], "no_calls"),
        ([call(), call()], "several_calls"),
        ([call().model_copy(update={"response_ids": ""})], "no_calls"),
        ([call().model_copy(update={"untrainable": "missing_token_ids"})], "no_calls"),
        ([call().model_copy(update={"prompt_ids": "", "untrainable": "redacted"})], "redacted"),
    ],
)
def test_an_answer_without_the_tokens_of_one_call_has_a_reason(
    calls: list[CapturedCall], reason: str
) -> None:
    with pytest.raises(EditKept, match=f"^{reason}"):
        RecordedAnswer.of(calls)


def test_an_edit_of_an_answer_with_reasoning_is_kept() -> None:
    """The edit would be rendered without reasoning, or with an empty block of it."""
    for name in ("reasoning", "reasoning_content"):
        with pytest.raises(EditKept, match=r"^reasoning"):
            check_message({"role": "assistant", "content": "4", name: "2+2 is 4."})
        check_message({"role": "assistant", "content": "4", name: ""})


def test_an_answer_to_sampling_that_is_not_trained_can_be_edited() -> None:
    greedy = call().model_copy(update={"untrainable": "sampling_not_trainable: temperature 0"})
    assert list(RecordedAnswer.of([greedy]).response_ids) == [70000, 5]


def test_sft_imitates_the_edit_and_dpo_prefers_it_to_the_served_answer() -> None:
    (plain,) = demonstrations("sft", ANSWER, [4, END])
    chosen, rejected = demonstrations("dpo", ANSWER, [4, END])
    assert (plain.kind, chosen.kind, rejected.kind) == ("plain", "chosen", "rejected")
    responses = [unpack_ids(one.response_ids) for one in (plain, chosen, rejected)]
    assert responses == [[4, END], [4, END], [7, 8, END]]
    assert all(unpack_ids(one.prompt_ids) == PROMPT for one in (plain, chosen, rejected))
