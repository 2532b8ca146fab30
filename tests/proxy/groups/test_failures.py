"""Failed answers: failures of the model stay in the group, failures of the engine do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm.config.model import load
from fakevllm.errors import ConfigError
from fakevllm.groups.sibling_selection import Failure, failure_of, is_broken_off, with_floor
from fakevllm.metrics import Metrics
from fakevllm_adapters.formats.base import Answer
from tests.proxy.groups.group_rig import Stage, staged

TOOLS: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "add"}}]}
JSON: dict[str, Any] = {"response_format": {"type": "json_object"}}


def calls(*arguments: object) -> dict[str, Any]:
    return {
        "content": None,
        "tool_calls": [{"function": {"name": "add", "arguments": one}} for one in arguments],
    }


@pytest.mark.parametrize(
    ("message", "finish_reason", "body", "failure"),
    [
        ({"content": "Seven"}, "stop", {}, None),
        ({"content": "Sev"}, "length", {}, "cut_off"),
        (calls('{"a": '), "length", TOOLS, "cut_off"),
        ({"content": " \n"}, "stop", {}, "empty"),
        ({"content": None, "reasoning": "Well,"}, "stop", {}, "empty"),
        (calls('{"a": 1}', ""), "tool_calls", TOOLS, None),
        (calls('{"a": 1}', '{"a": '), "tool_calls", TOOLS, "broken_tool_call"),
        (calls("[1]"), "tool_calls", TOOLS, "broken_tool_call"),
        ({"content": None, "tool_calls": ["odd"]}, "tool_calls", TOOLS, "broken_tool_call"),
        ({"content": '<tool_call>{"name": add}</tool_call>'}, "stop", TOOLS, "broken_tool_call"),
        ({"content": "<tool_call>"}, "stop", TOOLS | {"tool_choice": "none"}, None),
        ({"content": "<tool_call>"}, "stop", {}, None),
        ({"content": '{"a": 1}'}, "stop", JSON, None),
        ({"content": '{"a": 1'}, "stop", JSON, "not_json"),
        ({"content": "[" * 100_000}, "stop", JSON, "not_json"),
        (calls("{}"), "tool_calls", TOOLS | JSON, None),
        ({"content": "Seven"}, "stop", {"response_format": "odd"}, None),
    ],
)
def test_a_failure_of_the_model_is_recognized_by_its_answer(
    message: dict[str, Any], finish_reason: str, body: dict[str, Any], failure: str | None
) -> None:
    assert failure_of(Answer(message, finish_reason), body) == failure


def test_an_answer_that_the_engine_aborted_is_not_a_failure_of_the_model() -> None:
    ends = ("stop", "length", "tool_calls", "abort", "error")
    assert [is_broken_off(Answer({"content": "S"}, end)) for end in ends] == [False] * 3 + [
        True
    ] * 2


@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.floats(-9, 9)), st.sampled_from([None, *Failure])),
        min_size=1,
    ),
    st.floats(-9, 9),
)
def test_a_failed_answer_never_has_the_highest_reward(
    siblings: list[tuple[float | None, Failure | None]], floor: float
) -> None:
    before = [reward for reward, _ in siblings]
    failures = [failure for _, failure in siblings]
    after = with_floor(before, failures, floor)
    well = [reward for reward, failure in zip(after, failures, strict=True) if failure is None]
    assert well == [one for one, failure in siblings if failure is None], "they keep theirs"
    failed = {reward for reward, failure in zip(after, failures, strict=True) if failure}
    assert all(reward is not None and reward <= floor for reward in failed)
    others = [reward for reward in well if reward is not None]
    assert all(one is not None and one <= other for one in failed for other in others)
    assert with_floor(before, failures, None) == before


def record_of(stage: Stage) -> list[tuple[float | None, str | None]]:
    return [(sibling.reward, sibling.failure) for sibling in stage.record.siblings]


async def test_a_truncated_answer_gets_the_floor_and_its_group_is_trained() -> None:
    async with staged(3, failure_floor=-1.0) as stage:
        for index, word in enumerate(("answers", "is cut off", "answers")):
            await stage.act(index, word)
        await stage.score(0.5, None, None)
        assert stage.record.state == "scored" and stage.record.served_index == 0
        assert record_of(stage) == [(0.5, None), (-1.0, "cut_off"), (None, None)]


async def test_without_a_floor_the_hook_scores_failures() -> None:
    async with staged(2) as stage:
        await stage.act(0, "answers")
        await stage.act(1, "is cut off")
        await stage.score(0.5, 0.75)
        assert record_of(stage) == [(0.5, None), (0.75, "cut_off")]
        assert stage.record.served_index == 1


@pytest.mark.parametrize("word", ["is aborted", "fails", "breaks"])
async def test_an_answer_that_the_engine_aborted_is_not_scored_with_the_floor(
    word: str,
) -> None:
    async with staged(3, failure_floor=-1.0, hold_s=0.0) as stage:
        for index, own in enumerate(("answers", word, "answers")):
            await stage.act(index, own)
        assert stage.hook.scored == [[0, 2]]
        await stage.score(0.5, 0.25)
        rewards = [sibling.reward for sibling in stage.record.siblings]
        assert (stage.record.state, rewards) == ("scored", [0.5, None, 0.25])


async def test_a_group_without_a_finished_answer_is_answered_and_dropped() -> None:
    async with staged(2) as stage:
        for index in range(2):
            await stage.act(index, "is aborted")
        assert stage.is_answered and stage.hook.scored == []
        assert (stage.record.state, stage.record.reason) == ("dropped", "broken_off")


async def test_no_floor_is_applied_if_the_hook_fails() -> None:
    async with staged(2, failure_floor=0.0) as stage:
        await stage.act(0, "answers")
        await stage.act(1, "is cut off")
        await stage.score(fails=True)
        assert stage.record.state == "dropped"
        assert record_of(stage) == [(None, None), (None, "cut_off")]


async def test_failures_are_counted_by_reason() -> None:
    metrics = Metrics()
    metrics.labelled_gauge("fakevllm_groups_dropped", "Told.", "reason", lambda: {"tied": 3})
    async with staged(3) as stage:
        for index, word in enumerate(("answers", "is cut off", "fails")):
            await stage.act(index, word)
        await stage.score(0.5, 0.75)
        metrics.group_ended(stage.record)
    text = metrics.text().decode()
    of_route = 'route="/v1/chat/completions"'
    for failure in ("cut_off", "no_answer"):
        name = f'fakevllm_siblings_failed_total{{failure="{failure}",{of_route}}}'
        assert f"{name} 1.0" in text
    assert 'fakevllm_groups_dropped{reason="tied"} 3.0' in text


@pytest.mark.parametrize("floor", ["nan", "inf", '"low"'])
def test_a_floor_is_a_number(tmp_path: Path, floor: str) -> None:
    file = tmp_path / "fakevllm.toml"
    file.write_text(f"[reward]\nfailure_floor = {floor}\n")
    with pytest.raises(ConfigError, match=r"reward\.failure_floor"):
        load(file, {})
