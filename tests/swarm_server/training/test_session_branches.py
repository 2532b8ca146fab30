"""Sessions that branch are counted by cause, with and without the model's own tokenizer."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from swarm_server.forest.tiny_tokenizer import FULL, encode, prompt_of
from swarm_server.local_backend import LocalBackend
from swarm_server.loops import Run
from swarm_server.samples import call

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.forest.call_text_comparison import Vocabulary
from fakevllm_server.run.tokenizer_reader import load_vocabulary
from fakevllm_server.run.trained_token_share import additive_metrics
from fakevllm_server.training import session_branches as branches_module
from fakevllm_server.training.session_branches import branch_metrics
from fakevllm_server.types.backend import Batch, LossSpec, StepMetrics
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode

END = "<|im_end|>"


def call_of(prompt: str, response: str) -> RecordedCall:
    return replace(call(), prompt_ids=encode(prompt), response_ids=encode(response))


def episodes(*sessions: list[RecordedCall]) -> list[FinishedGroup]:
    return [
        FinishedGroup("task:a#1", [ScoredEpisode(at, 1.0, own) for at, own in enumerate(sessions)])
    ]


FIRST = call_of(prompt_of("system: s", "user: hi"), f"<think>hm</think>hello{END}")
NEXT = call_of(
    prompt_of("system: s", "user: hi", "assistant: <think>hm</think>hello", "user: more"), "x"
)
STRIPPED = call_of(prompt_of("system: s", "user: hi", "assistant: hello", "user: more"), "x")


def test_each_episode_is_a_separate_session() -> None:
    assert branch_metrics(episodes([FIRST, NEXT], [FIRST, STRIPPED]), FULL) == {
        "branch_first": 2,
        "branch_extends": 1,
        "branch_thinking_stripped": 1,
        "drift_rate": 0.5,
        "branch_rate": 0.5,
    }


def test_without_a_tokenizer_a_cause_that_needs_text_is_unknown() -> None:
    metrics = branch_metrics(episodes([FIRST, NEXT, STRIPPED]))
    assert (metrics["branch_extends"], metrics["branch_unknown"]) == (1, 1)


def test_a_repeated_call_counts_as_a_branch_but_not_as_drift() -> None:
    metrics = branch_metrics(episodes([FIRST, FIRST]), FULL)
    assert (metrics["branch_regenerated"], metrics["branch_rate"], metrics["drift_rate"]) == (
        1,
        1,
        0,
    )


def test_siblings_of_one_call_are_not_sessions() -> None:
    assert branch_metrics(episodes([FIRST], [STRIPPED])) == {}


def test_the_next_turn_of_passive_traffic_is_compared_with_the_served_answer() -> None:
    def turn(*prompts: RecordedCall, follows: RecordedCall | None) -> FinishedGroup:
        siblings = [ScoredEpisode(at, 1.0, [one]) for at, one in enumerate(prompts)]
        return FinishedGroup("g", siblings, follows)

    metrics = branch_metrics(
        [turn(FIRST, FIRST, follows=None), turn(NEXT, NEXT, follows=FIRST)], FULL
    )
    assert metrics == {"branch_extends": 1, "drift_rate": 0, "branch_rate": 0}
    metrics = branch_metrics([turn(STRIPPED, STRIPPED, follows=FIRST)], FULL)
    assert metrics == {"branch_thinking_stripped": 1, "drift_rate": 1, "branch_rate": 1}


def test_the_vocabulary_is_loaded_from_the_model_folder() -> None:
    pytest.importorskip("tokenizers")
    vocabulary = load_vocabulary(str(DEMO_MODEL_DIR))
    assert vocabulary.decode is not None and vocabulary.message_start is not None
    assert vocabulary.decode([vocabulary.message_start]) == "<|im_start|>"
    assert {vocabulary.decode([id]) for id in vocabulary.special_ids} >= {"<|im_start|>", END}


@pytest.mark.parametrize("model", [None, "nowhere", "broken"])
def test_a_model_without_a_readable_tokenizer_has_an_empty_vocabulary(
    tmp_path: Path, model: str | None
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    assert load_vocabulary(model and str(tmp_path / model)) == Vocabulary()


class SignallingBackend(LocalBackend):
    def __init__(self) -> None:
        super().__init__()
        self.is_training = threading.Event()

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        self.is_training.set()
        return await super().step(batch, loss)


async def test_branch_metrics_are_computed_while_the_step_is_trained(tmp_path: Path) -> None:
    backend = SignallingBackend()
    is_training: list[bool] = []

    def vocabulary() -> Vocabulary:
        is_training.append(backend.is_training.wait(timeout=60))
        return Vocabulary()

    run = Run(tmp_path, backend, vocabulary=vocabulary)
    await run.finish_group("a")
    await run.trained("a")
    (entry,) = [one for one in run.log.entries_after(0) if one.kind == "step"]
    assert is_training == [True] and "branch_rate" not in entry.metrics
    assert entry.metrics["sample_coverage"] == 1
    await run.stop()


def test_calls_beyond_the_token_limit_are_compared_by_ids_only_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = episodes([FIRST, STRIPPED, NEXT])
    monkeypatch.setattr(branches_module, "MAX_TOKENS", 1)
    metrics = branch_metrics(groups, FULL)
    assert metrics == {
        "branch_first": 1,
        "branch_extends": 1,
        "branch_not_read": 1,
        "drift_rate": 0,
        "branch_rate": 0.5,
    }
    assert "branch_not_read" in additive_metrics(metrics)
    assert branch_metrics(groups)["branch_unknown"] == 1  # without a tokenizer nothing is read
    monkeypatch.undo()
    assert branch_metrics(groups, FULL)["branch_thinking_stripped"] == 1
