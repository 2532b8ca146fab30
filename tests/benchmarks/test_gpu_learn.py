"""Learning on a GPU machine: the made-up tasks, the comparison of the arms, and the whole command
on a CPU with a tiny model."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_learn_parts.arms import ARMS, ArmRun
from benchmarks.gpu_learn_parts.comparison import ArmReport
from benchmarks.gpu_learn_parts.hook import is_right
from benchmarks.gpu_learn_parts.sizes import SIZES
from benchmarks.gpu_learn_parts.tasks import TaskKind, dataset, random_questions
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest

ROOT = Path(__file__).parents[2]
KINDS = [kind for size in SIZES.values() for kind in size.kinds]


def answer(text: str) -> dict[str, Any]:
    """Return the assistant message that the engine makes of a reply's text."""
    before, _, call = text.partition("<tool_call>")
    message: dict[str, Any] = {"content": before, "finish_reason": "stop"}
    if call:
        function = json.loads(call.removesuffix("</tool_call>"))
        function["arguments"] = json.dumps(function["arguments"])
        message["tool_calls"] = [{"function": function}]
    return message


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_hook_accepts_each_right_reply_and_no_wrong_one(kind: TaskKind) -> None:
    source = random_questions(kind, random.Random(1))
    for _ in range(300):
        question = next(source)
        row = {"kind": kind.name, **question.fields}
        assert is_right(row, answer(question.right)), question
        assert not is_right(row, answer(question.wrong)), question
        assert not is_right(row, answer(question.right) | {"finish_reason": "length"}), question


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 * 5 + 8", True),
        ("8 + 5 * 3", True),
        ("23", False),
        ("3 * 5 + 4 + 4", False),
        ("3 * 5 - 8", False),
        ("3 * (5 + 8)", False),
        ("3 ** 5 + 8", False),
        ("", False),
    ],
)
def test_a_countdown_needs_each_number_once_and_the_target(text: str, expected: bool) -> None:
    row = {"kind": "countdown", "numbers": [3, 5, 8], "target": 23}
    assert is_right(row, answer(text)) == expected


@pytest.mark.parametrize("name", list(SIZES))
def test_no_held_out_question_is_in_any_training_set(name: str) -> None:
    size = SIZES[name]
    plan = size.reinforcement
    held_out = dataset(size.kinds, plan.held_out_per_kind, 0, held_out=True)
    texts = {row["question"] for row in held_out}
    for kind in size.kinds:
        own = [row for row in held_out if row["kind"] == kind.name]
        assert len(own) == plan.held_out_per_kind
        source = random_questions(kind, random.Random(2))
        assert texts.isdisjoint(next(source).text for _ in range(3000))
    for seed in range(3):
        training = dataset(size.kinds, plan.rows_per_kind, seed, held_out=False)
        assert texts.isdisjoint(row["question"] for row in training)
        assert training == dataset(size.kinds, plan.rows_per_kind, seed, held_out=False)


def test_prompts_in_training_are_those_that_the_engine_renders() -> None:
    pytest.importorskip("torch")
    pretraining: Any = import_module("benchmarks.gpu_learn_parts.pretraining")
    rendering: Any = import_module("fakevllm_server.backends.embedded.decode.chat_renderer")
    kinds = SIZES["tiny"].kinds
    tokenizer = pretraining.make_tokenizer(kinds, 512)
    source = pretraining.BatchSource(kinds, tokenizer, 512)
    renderer = rendering.ChatRenderer(tokenizer, "made-up", 512, 10_000)
    for step, kind in enumerate(kinds):
        for prompt, reply in source.batch(step):
            question = tokenizer.decode(prompt).split("user\n")[1].split("<|im_end|>")[0]
            messages = [{"role": "user", "content": question}]
            tools: Any = list(kind.tools) or None
            request = ChatRequest(messages=messages, tools=tools)
            assert renderer.render(request) == prompt
            assert tokenizer.decode(reply).endswith("<|im_end|>")


def finished(end: float, updates: int = 80) -> ArmRun:
    """Return the figures of an arm that ended with this share of right answers, and began with
    0.4."""

    def rewards(share: float) -> dict[str, dict[str, list[float]]]:
        right = round(10 * share)
        return {"sums": {f"question {i}": [1.0] * right + [0.0] * (10 - right) for i in range(80)}}

    return ArmRun(80, 640, 5120, updates, True, rewards(0.4), rewards(end), 20.0, 100.0, 150.0)


@pytest.mark.parametrize(
    ("name", "run", "problem"),
    [
        ("n8", finished(0.8), None),
        ("n8", finished(0.4), "did not learn"),
        ("n8", finished(0.2), "did not learn"),
        ("n2", finished(0.8, updates=0), "no step changed the weights"),
        ("shuffled", finished(0.2), None),
        ("shuffled", finished(0.8), "learned from shuffled rewards"),
        ("frozen", finished(0.4, updates=0), None),
        ("frozen", finished(0.4, updates=1), "1 steps changed the weights"),
        ("frozen", finished(0.8, updates=0), "frozen weights, and another score"),
    ],
)
def test_an_arm_that_did_not_learn_as_expected_has_a_problem(
    name: str, run: ArmRun, problem: str | None
) -> None:
    report = ArmReport(name, ARMS[name], run, is_judged=True)
    assert report.problem == problem
    assert report.as_json()["change"]["mean"] == pytest.approx(report.gain.change.mean)


def test_a_short_run_is_not_judged_by_what_it_learned() -> None:
    report = ArmReport("n8", ARMS["n8"], finished(0.2), is_judged=False)
    assert (report.problem, report.verdict) == (None, "not judged")


def test_the_table_says_when_an_arm_was_stopped_by_the_time_limit() -> None:
    run = replace(finished(0.8), is_complete=False)
    report = ArmReport("n8", ARMS["n8"], run, is_judged=True)
    assert report.cells["verdict"] == "as expected, but stopped by the time limit"
    assert report.cells["sums"] == "0.40 → 0.80"


def learn(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [ROOT, ROOT / "server", ROOT / "adapters", ROOT / "tests"]
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_learn", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": ":".join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=290,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_arms_run_over_a_model_trained_from_nothing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = learn("--device", "cpu", "--tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr

    summary = json.loads((tmp_path / "learn.json").read_text())
    assert {part["name"]: part["state"] for part in summary["parts"]} == dict.fromkeys(
        ("model", *ARMS), "passed"
    )
    plan = SIZES["tiny"].reinforcement
    assert (summary["is_cpu"], summary["model"]["steps"]) == (True, 500)
    arms = {arm["arm"]: arm for arm in summary["arms"]}
    assert list(arms) == list(ARMS)
    for name, arm in arms.items():
        assert (arm["steps"], arm["is_complete"]) == (plan.num_steps, True)
        assert arm["answers"] == plan.num_steps * plan.answers_per_step
        assert arm["questions"] == arm["answers"] // ARMS[name].num_siblings
        assert arm["updates"] == (0 if name == "frozen" else plan.num_steps)
        assert list(arm["kinds"]) == ["sums", "countdown", "tools"]
        assert arm["change"]["low"] <= arm["change"]["mean"] <= arm["change"]["high"]
    table = (tmp_path / "learn.md").read_text()
    assert "This ran on a CPU" in table
    assert "| frozen | 8 | 3 | 12 | 96 |" in table


def test_without_a_model_the_arms_are_skipped_with_the_reason(tmp_path: Path) -> None:
    done = learn("--device", "cpu", "--tiny", "--out", str(tmp_path), "--parts", "n2,n8")
    assert done.returncode == 1
    summary = json.loads((tmp_path / "learn.json").read_text())
    reasons = {part["name"]: (part["state"], part["reason"]) for part in summary["parts"]}
    no_model = "skipped", f"there is no model in {tmp_path / 'model'}"
    assert reasons == {"n2": no_model, "n8": no_model}
