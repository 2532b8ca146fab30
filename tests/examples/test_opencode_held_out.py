"""The held-out rows of the opencode example."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.opencode.held_out import held_out_rows
from examples.opencode.hooks.on_compute_relative_reward import TESTS
from examples.opencode.opencode_command import QUESTION
from fakevllm.admission.row_requests import check_requests
from fakevllm.config.model import load
from fakevllm_adapters.protocol.swarm import Task

RECORDED: dict[str, Any] = {
    "model": "app-model",
    "messages": [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": f'"{QUESTION}"\n'},
    ],
    "tools": [{"type": "function", "function": {"name": "write"}}],
}


def test_each_held_out_row_has_opencodes_request_for_its_own_question() -> None:
    rows = list(held_out_rows(RECORDED))

    assert len(rows) == len(TESTS) / 5
    for row in rows:
        assert row["question"] in TESTS
        assert row["messages"][0] == RECORDED["messages"][0]
        assert row["messages"][1]["content"] == f'"{row["question"]}"\n'
        assert row["tools"] == RECORDED["tools"]


def test_a_request_without_the_recorded_question_is_an_error() -> None:
    other = RECORDED | {"messages": [{"role": "user", "content": "What is 1 plus 2?"}]}

    with pytest.raises(ValueError, match="does not contain the question"):
        list(held_out_rows(other))


def test_the_held_out_rows_pass_the_proxys_check() -> None:
    rows = list(held_out_rows(RECORDED))
    tasks = [
        Task(task_id=row["question"], main_query=row["question"], metadata=row) for row in rows
    ]

    check_requests(tasks, Path("held_out.jsonl"))


def test_the_held_out_rows_have_every_file_name_and_several_sums() -> None:
    rows = list(held_out_rows(RECORDED))

    assert len({row["file"] for row in rows}) == 4
    assert len({row["content"] for row in rows}) >= 5


def test_the_configuration_with_the_gate_differs_from_the_other_only_in_the_gate() -> None:
    folder = Path(__file__).parents[2] / "examples/opencode"
    plain, gated = (load(folder / name, {}) for name in ("fakevllm.toml", "gated.toml"))

    assert gated.release.is_gated and not plain.release.is_gated
    assert gated.model_copy(update={"release": plain.release}) == plain
