"""The requests of held-out rows."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from fakevllm.admission import row_requests
from fakevllm.admission.row_requests import check_requests, request_of
from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.swarm import Task

USER = {"role": "user", "content": "2 plus 3?"}


def row(**fields: object) -> Task:
    return Task(task_id="r", main_query="2 plus 3?", metadata=dict(fields))


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(row_requests)
    assert results.attempted > 0 and results.failed == 0


def test_fields_of_the_dataset_are_not_sent_without_messages() -> None:
    assert request_of(row(tools=["hammer"], answer="5")) == {"messages": [USER]}


def test_messages_tools_and_limits_are_sent_and_nothing_else() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    fields = {"messages": [USER], "tools": tools, "stop": ["."], "max_tokens": 8}
    sent = request_of(row(**fields, answer="5", temperature=0.0, model="other", n=3, stream=True))

    assert sent == fields


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "are empty"),
        ("2 plus 3?", "are not a list"),
        (["2 plus 3?"], "are not a list of objects"),
        ([USER, {"role": "assistant", "content": "5"}], "end with an answer"),
    ],
)
def test_messages_that_are_no_request_are_refused_with_the_row(
    messages: object, problem: str
) -> None:
    good = row(messages=[USER])
    with pytest.raises(ConfigError, match=f"held.jsonl, the row '2 plus 3.' .* {problem}"):
        check_requests([good, row(messages=messages)], Path("held.jsonl"))


def test_rows_with_and_without_messages_are_accepted() -> None:
    parts = [{"type": "text", "text": "Please: 2 PLUS  3?"}]
    later = [USER, {"role": "assistant", "content": "5"}, {"role": "user", "content": "Why?"}]
    good = [row(), row(messages=None), row(messages=[USER]), row(messages=later)]
    good += [row(messages=[{"role": "user", "content": parts}])]
    system = {"role": "system", "content": "Be brief."}
    good += [row(messages=[system, USER], system="kept for the hook")]

    check_requests(good, Path("held.jsonl"))


@pytest.mark.parametrize("text", ["task 17", "2 plus 33?"])
def test_a_row_whose_text_is_not_in_its_messages_is_refused(text: str) -> None:
    task = Task(task_id="r", main_query=text, metadata={"messages": [USER]})
    with pytest.raises(ConfigError, match="do not contain its text"):
        check_requests([task], Path("held.jsonl"))


def test_a_row_without_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no text"):
        check_requests([Task(task_id="r", main_query=" \n", metadata={})], Path("held.jsonl"))


def test_a_system_prompt_beside_the_messages_is_refused() -> None:
    with pytest.raises(ConfigError, match="field `system`, which is not sent"):
        check_requests([row(messages=[USER], system="Be brief.")], Path("held.jsonl"))
