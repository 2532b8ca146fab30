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


def test_messages_and_tools_are_sent_and_nothing_else() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    sent = request_of(row(messages=[USER], tools=tools, answer="5", temperature=0.0))

    assert sent == {"messages": [USER], "tools": tools}


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        (None, "are no list"),
        ([], "are no list"),
        ("2 plus 3?", "are no list"),
        (["2 plus 3?"], "are no list of objects"),
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
    check_requests([row(), row(messages=[USER])], Path("held.jsonl"))
