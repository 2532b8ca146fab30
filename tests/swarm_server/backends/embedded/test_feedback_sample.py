"""Feedback samples move the model towards answers with positive feedback and away from others, also
in one step with the answer's own group."""

from __future__ import annotations

from pathlib import Path

from swarm_server.backends.embedded.engine_helpers import plain_logprobs, train
from swarm_server.backends.embedded.train.test_trainer import sampled_calls

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.training.step_plan import plan_step
from fakevllm_server.types.backend import Call
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode, VersionSpan

JOB = TrainJob(lr=1e-3)


def recorded(call: Call) -> RecordedCall:
    spans = [VersionSpan(call.version, 0, len(call.response_ids))]
    sampled = RecordedCall(
        list(call.prompt_ids), list(call.response_ids), list(call.logprobs), spans,
        call.temperature, "stop", None,
    )  # fmt: skip
    return RecordedCall.from_wire(sampled.to_wire())


def sample(name: str, call: Call, advantage: float) -> FinishedGroup:
    return FinishedGroup(name, [ScoredEpisode(0, advantage, [recorded(call)])], advantage=advantage)


def logprob(trainer: PolicyTrainer, call: Call) -> float:
    plain = plain_logprobs(trainer.model, [*call.prompt_ids, *call.response_ids])
    start = len(call.prompt_ids) - 1
    return sum(plain[start + at, token].item() for at, token in enumerate(call.response_ids))


def test_positive_feedback_makes_an_answer_likelier_and_negative_less(
    trainer: PolicyTrainer, tiny_folder: Path
) -> None:
    calls = sampled_calls(tiny_folder, 1.0)[:4]
    advantages = [1.25, -0.75, 0.5, -1.0]
    before = [logprob(trainer, call) for call in calls]
    samples = [
        sample(f"feedback:g/{at}", *one)
        for at, one in enumerate(zip(calls, advantages, strict=True))
    ]
    train(trainer, plan_step(1, samples, JOB).batch.calls, lr=1e-3)
    for call, advantage, earlier in zip(calls, advantages, before, strict=True):
        assert (logprob(trainer, call) - earlier) * advantage > 0


def test_a_step_may_hold_an_answer_both_in_its_group_and_with_its_feedback(
    trainer: PolicyTrainer, tiny_folder: Path
) -> None:
    """The step contains the same tokens twice. The forest shares them, and the loss has both."""
    one, other = sampled_calls(tiny_folder, 1.0)[:2]
    group = FinishedGroup(
        "g", [ScoredEpisode(0, 0.5, [recorded(one)]), ScoredEpisode(1, 0.5, [recorded(other)])]
    )
    plan = plan_step(1, [group, sample("feedback:g/a", one, -1.0)], JOB)
    assert [trained.siblings for trained in plan.trained] == [[0, 1], [0]]
    both = plan.batch.calls
    assert [call.advantage for call in both] == [0.0, 0.0, -1.0]
    before = logprob(trainer, one)
    train(trainer, both, lr=1e-3)
    assert logprob(trainer, one) < before
