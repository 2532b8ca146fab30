"""The row of a group in each format, and the reasons why a group has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson
import pytest

from fakevllm.export.conversation import NotExported
from fakevllm.export.exported_group import ExportedGroup
from fakevllm.export.row_formats import FORMATS, row_of
from fakevllm.ledger.records import FeedbackRecord, GroupRecord, SiblingRecord
from tests.proxy.ledger.ledger_cases import group, sibling

Json = dict[str, Any]
PROMPT = [{"role": "user", "content": "1+1?"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
REQUEST: Json = {"messages": PROMPT, "tools": TOOLS}
TRAINABLE = ["messages", "sft", "preference", "kto"]


def feedback(**fields: Any) -> FeedbackRecord:
    return FeedbackRecord(group_id="g1", feedback_id="f", received_at=0.0, **fields)


def answers(*siblings: SiblingRecord) -> GroupRecord:
    return replace(group(), siblings=siblings)


def row(
    name: str,
    record: GroupRecord,
    rows: Sequence[FeedbackRecord] = (),
    request: Json | None = REQUEST,
    min_difference: float = 0.0,
) -> Json:
    return row_of(FORMATS[name], ExportedGroup(record, rows, lambda: request), min_difference)


def reason(name: str, record: GroupRecord, *rows: FeedbackRecord, **options: Any) -> str:
    with pytest.raises(NotExported) as error:
        row(name, record, rows, **options)
    return str(error.value)


def answer(number: int) -> list[Json]:
    return [{"role": "assistant", "content": f"answer {number}"}]


def test_messages_end_with_the_served_answer() -> None:
    exported = row("messages", group(rewards=[0.0, 1.0], served=0))
    assert exported["messages"] == [*PROMPT, *answer(0)]
    assert (exported["tools"], exported["chat_template_kwargs"]) == (TOOLS, {})
    assert (exported["reward"], exported["group_id"]) == (0.0, "g1")


def test_the_completion_is_the_best_answer() -> None:
    exported = row("sft", group(rewards=[0.5, 1.0, None], served=0))
    assert (exported["prompt"], exported["completion"]) == (PROMPT, answer(1))
    assert (exported["reward"], exported["source"]) == (1.0, "best")


def test_of_several_best_answers_the_served_one_is_the_completion() -> None:
    assert row("sft", group(rewards=[1.0, 1.0, 1.0], served=1))["completion"] == answer(1)
    assert row("sft", group(rewards=[0.0, 1.0, 1.0], served=0))["completion"] == answer(1)


def test_a_users_edit_is_the_completion_and_the_chosen_answer() -> None:
    record, edit = group(rewards=[1.0, 0.0], served=0), feedback(edited="2")
    message = [{"role": "assistant", "content": "2"}]
    assert row("sft", record, [edit])["completion"] == message
    pair = row("preference", record, [edit])
    assert (pair["chosen"], pair["rejected"], pair["source"]) == (message, answer(0), "edit")
    assert (pair["reward_chosen"], pair["reward_rejected"]) == (None, 1.0)


def test_an_edit_that_changes_nothing_makes_no_pair() -> None:
    edit = feedback(edited="answer 0")
    for rewards in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]):
        assert reason("preference", group(rewards=rewards), edit) == "equal_answers"


def test_neither_answer_of_an_edited_pair_has_reasoning() -> None:
    thinking = '{"content":"3","reasoning_content":"1 and 1"}'
    record = answers(replace(sibling(0, served=True), message_json=thinking))
    pair = row("preference", record, [feedback(edited="2")])
    assert pair["rejected"] == [{"role": "assistant", "content": "3"}]
    assert reason("preference", record, feedback(edited="3")) == "equal_answers"
    reasoned = answers(
        replace(sibling(0, 1.0, served=True), message_json=thinking), sibling(1, 0.0)
    )
    assert row("preference", reasoned)["chosen"][0]["reasoning_content"] == "1 and 1"


def test_a_pair_is_the_best_and_the_worst_answer() -> None:
    pair = row("preference", group(rewards=[0.5, 1.0, 0.25], served=0))
    assert (pair["chosen"], pair["rejected"]) == (answer(1), answer(2))
    assert (pair["reward_chosen"], pair["reward_rejected"]) == (1.0, 0.25)


@pytest.mark.parametrize(("smallest", "is_pair"), [(0.0, True), (0.5, True), (0.75, False)])
def test_pairs_need_the_smallest_difference(smallest: float, is_pair: bool) -> None:
    record = group(rewards=[0.5, 1.0])
    if is_pair:
        assert row("preference", record, min_difference=smallest)["chosen"] == answer(1)
    else:
        assert reason("preference", record, min_difference=smallest) == "no_difference"


def calling(index: int, reward: float, arguments: str) -> SiblingRecord:
    function = {"name": "add", "arguments": arguments}
    message = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    return replace(sibling(index, reward), message_json=orjson.dumps(message).decode())


def test_an_answer_with_a_broken_tool_call_is_not_the_rejected_one() -> None:
    broken = calling(0, -1.0, "{")
    pair = row("preference", answers(broken, sibling(1, 0.0), sibling(2, 1.0)))
    assert (pair["rejected"], pair["reward_rejected"]) == (answer(1), 0.0)
    assert reason("preference", answers(broken, sibling(1, 0.0))) == "broken_tool_call"


def test_thumbs_make_no_pairs() -> None:
    record = group(rewards=[1.0, 1.0])
    assert reason("preference", record, feedback(thumbs="down", value=-1.0)) == "no_difference"


def test_equal_answers_with_different_rewards_make_no_pair() -> None:
    same = replace(sibling(0), index=1, reward=1.0)
    assert reason("preference", answers(sibling(0, 0.0), same)) == "equal_answers"
    other = replace(sibling(2), reward=0.5)
    pair = row("preference", answers(sibling(0, 0.0), same, other))
    assert (pair["rejected"], pair["reward_rejected"]) == (answer(2), 0.5)


@pytest.mark.parametrize("name", ["sft", "preference", "groups"])
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (float("inf"), "^reward is inf, and not a finite number"),
        ("high", "^reward is str, and not number"),
    ],
)
def test_a_reward_that_is_no_finite_number_is_named(name: str, reward: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        row(name, answers(replace(sibling(0), reward=reward), sibling(1, 1.0)))


def test_an_unusable_answer_may_be_rejected_but_not_chosen() -> None:
    cut = replace(sibling(0, 2.0), failure="cut_off")
    record = answers(cut, sibling(1, 1.0), sibling(2, 0.0))
    assert row("sft", record)["completion"] == answer(1)
    assert row("preference", record)["chosen"] == answer(1)
    worst = answers(replace(cut, reward=-1.0), sibling(1, 1.0))
    assert row("preference", worst)["rejected"] == answer(0)
    assert reason("sft", answers(cut)) == "unusable_answer"


@pytest.mark.parametrize(
    ("fields", "label"),
    [({"thumbs": "up"}, True), ({"thumbs": "down"}, False), ({"score": 0.5}, True)],
)
def test_the_label_is_the_users_verdict(fields: Json, label: bool) -> None:
    exported = row("kto", group(rewards=[0.0, 1.0], served=0), [feedback(**fields)])
    assert (exported["completion"], exported["label"]) == (answer(0), label)


def test_answers_without_a_verdict_have_no_label() -> None:
    for rows in ([], [feedback(comment="hm")], [feedback(score=0.0)], [feedback(edited="2")]):
        assert reason("kto", group(), *rows) == "no_feedback"


def test_a_cut_off_answer_is_a_bad_example_and_never_a_good_one() -> None:
    record = answers(replace(sibling(0, served=True), failure="cut_off"))
    assert row("kto", record, [feedback(thumbs="down")])["label"] is False
    assert reason("kto", record, feedback(thumbs="up")) == "unusable_answer"
    assert reason("messages", record) == "unusable_answer"


@pytest.mark.parametrize("name", TRAINABLE)
def test_groups_without_a_conversation_have_no_row(name: str) -> None:
    rows = [feedback(thumbs="up")]
    assert reason(name, group(), *rows, request=None) == "no_messages"
    media = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
    assert reason(name, group(), *rows, request=media) == "media"


@pytest.mark.parametrize("name", ["messages", "kto"])
def test_groups_without_a_whole_served_answer_have_no_row(name: str) -> None:
    broken_off = replace(sibling(0, served=True), failure="broken_off")
    missing = replace(sibling(0, served=True), message_json=None)
    for record in (group(served=9), answers(broken_off), answers(missing)):
        assert reason(name, record, feedback(thumbs="up")) == "no_answer"


def test_groups_of_the_baseline_arm_are_exported() -> None:
    record = replace(group(rewards=[None]), arm="baseline", reason="other_arm", state="served")
    assert row("messages", record)["messages"][-1:] == answer(0)
    assert reason("sft", record) == "no_reward"


def test_groups_have_everything_but_tokens() -> None:
    record = replace(group(), reason="tied")
    exported = row("groups", record, [feedback(thumbs="up", value=1.0)])
    assert exported["task"] is None
    assert exported["request_json"] == record.request_json
    assert exported["messages"] == PROMPT
    assert [one["reward"] for one in exported["siblings"]] == [0.0, 1.0]
    assert exported["siblings"][0]["message"] == answer(0)[0]
    assert exported["feedback"][0]["thumbs"] == "up"
    assert row("groups", group(served=9), request=None)["messages"] == []
    assert exported["siblings"][0]["message_json"] == record.siblings[0].message_json
    broken = row("groups", answers(calling(0, 0.0, "{")))["siblings"][0]
    assert broken["message"] is None and "tool_calls" in broken["message_json"]
    orjson.dumps(exported)
