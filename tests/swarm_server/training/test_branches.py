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
from fakevllm_server.forest.text_comparison import Vocabulary
from fakevllm_server.run.coverage import additive_metrics
from fakevllm_server.training import branches as branches_module
from fakevllm_server.training.branches import branch_metrics
from fakevllm_server.training.vocabulary import load_vocabulary
from fakevllm_server.types.backend import Batch, LossSpec, StepMetrics
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode

END = "<|im_end|>"


def made(prompt: str, response: str) -> RecordedCall:
    return replace(call(), prompt_ids=encode(prompt), response_ids=encode(response))


def episodes(*sessions: list[RecordedCall]) -> list[FinishedGroup]:
    return [
        FinishedGroup("task:a#1", [ScoredEpisode(at, 1.0, own) for at, own in enumerate(sessions)])
    ]


FIRST = made(prompt_of("system: s", "user: hi"), f"<think>hm</think>hello{END}")
NEXT = made(
    prompt_of("system: s", "user: hi", "assistant: <think>hm</think>hello", "user: more"), "x"
)
STRIPPED = made(prompt_of("system: s", "user: hi", "assistant: hello", "user: more"), "x")


def test_each_episode_is_a_session_of_its_own() -> None:
    assert branch_metrics(episodes([FIRST, NEXT], [FIRST, STRIPPED]), FULL) == {
        "branch_first": 2,
        "branch_extends": 1,
        "branch_thinking_stripped": 1,
        "drift_rate": 0.5,
        "branch_rate": 0.5,
    }


def test_without_a_tokenizer_a_cause_that_needs_text_is_unknown() -> None:
    told = branch_metrics(episodes([FIRST, NEXT, STRIPPED]))
    assert (told["branch_extends"], told["branch_unknown"]) == (1, 1)


def test_one_call_asked_again_branches_and_is_no_drift() -> None:
    told = branch_metrics(episodes([FIRST, FIRST]), FULL)
    assert (told["branch_regenerated"], told["branch_rate"], told["drift_rate"]) == (1, 1, 0)


def test_siblings_of_one_call_are_no_sessions() -> None:
    assert branch_metrics(episodes([FIRST], [STRIPPED])) == {}


def test_the_next_turn_of_passive_traffic_is_held_against_the_answer_that_was_served() -> None:
    def turn(*prompts: RecordedCall, follows: RecordedCall | None) -> FinishedGroup:
        siblings = [ScoredEpisode(at, 1.0, [one]) for at, one in enumerate(prompts)]
        return FinishedGroup("g", siblings, follows)

    told = branch_metrics([turn(FIRST, FIRST, follows=None), turn(NEXT, NEXT, follows=FIRST)], FULL)
    assert told == {"branch_extends": 1, "drift_rate": 0, "branch_rate": 0}
    told = branch_metrics([turn(STRIPPED, STRIPPED, follows=FIRST)], FULL)
    assert told == {"branch_thinking_stripped": 1, "drift_rate": 1, "branch_rate": 1}


def test_the_models_own_folder_tells_causes_by_text() -> None:
    pytest.importorskip("tokenizers")
    vocabulary = load_vocabulary(str(DEMO_MODEL_DIR))
    assert vocabulary.decode is not None and vocabulary.message_start is not None
    assert vocabulary.decode([vocabulary.message_start]) == "<|im_start|>"
    assert {vocabulary.decode([id]) for id in vocabulary.special_ids} >= {"<|im_start|>", END}


@pytest.mark.parametrize("model", [None, "nowhere", "broken"])
def test_a_model_without_a_readable_tokenizer_leaves_ids(tmp_path: Path, model: str | None) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    assert load_vocabulary(model and str(tmp_path / model)) == Vocabulary()


class TellsWhenItTrains(LocalBackend):
    def __init__(self) -> None:
        super().__init__()
        self.is_training = threading.Event()

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        self.is_training.set()
        return await super().step(batch, loss)


async def test_branches_are_told_with_a_step_that_did_not_wait_for_them(tmp_path: Path) -> None:
    backend = TellsWhenItTrains()
    seen: list[bool] = []

    def vocabulary() -> Vocabulary:
        seen.append(backend.is_training.wait(timeout=5))
        return Vocabulary()

    run = Run(tmp_path, backend, vocabulary=vocabulary)
    await run.finish_group("a")
    await run.trained("a")
    (entry,) = [one for one in run.log.entries_after(0) if one.kind == "step"]
    assert seen == [True] and "branch_rate" not in entry.metrics
    assert entry.metrics["sample_coverage"] == 1
    await run.stop()


def test_calls_beyond_what_a_step_has_time_to_read_are_counted_and_ids_are_always_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = episodes([FIRST, STRIPPED, NEXT])
    monkeypatch.setattr(branches_module, "MAX_TOKENS", 1)
    told = branch_metrics(given, FULL)
    assert told == {
        "branch_first": 1,
        "branch_extends": 1,
        "branch_not_read": 1,
        "drift_rate": 0,
        "branch_rate": 0.5,
    }
    assert "branch_not_read" in additive_metrics(told)
    assert branch_metrics(given)["branch_unknown"] == 1  # without a tokenizer nothing is read
    monkeypatch.undo()
    assert branch_metrics(given, FULL)["branch_thinking_stripped"] == 1
