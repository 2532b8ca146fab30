"""From finished groups to the calls a step trains on. Pure; the seed decides what is shuffled."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fakevllm_adapters.swarm import TrainedGroup, TrainJob
from fakevllm_server.algorithms import ADVANTAGES
from fakevllm_server.backends.base import Batch, Call
from fakevllm_server.calls import FinishedGroup


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A batch and what went into it."""

    batch: Batch
    trained: list[TrainedGroup]
    """Every group of the step; `siblings` are those in its loss: none for a tied group where only
    rewards teach, none for control `frozen`."""
    metrics: dict[str, float]


def plan_step(step: int, groups: Sequence[FinishedGroup], job: TrainJob) -> PlannedStep:
    calls: list[Call] = []
    trained: list[TrainedGroup] = []
    for group in groups:
        own = list(_calls_of(group, job, step)) if _teaches(group, job) else []
        calls.extend(call for _, call in own)
        trained.append(
            TrainedGroup(group_id=group.group_id, siblings=sorted({index for index, _ in own}))
        )
    return PlannedStep(Batch(step, calls), trained, _metrics(groups, calls))


def _teaches(group: FinishedGroup, job: TrainJob) -> bool:
    """The KL term pulls on every call, a tied group's too."""
    return job.control != "frozen" and (group.has_signal or job.kl_loss_coef > 0)


def _calls_of(group: FinishedGroup, job: TrainJob, step: int) -> Iterator[tuple[int, Call]]:
    """Masked calls still count in their group's baseline, through their episode's reward.

    A call of advantage 0 stays: it is one of those the loss is the mean of.
    """
    scored = [episode for episode in group.episodes if episode.reward is not None]
    rewards = group.rewards
    if job.control == "shuffled":
        random.Random(f"{job.seed} {step} {group.group_id}").shuffle(rewards)
    advantages = ADVANTAGES[job.algorithm](rewards, job.std_floor)
    for episode, advantage in zip(scored, advantages, strict=True):
        for call in episode.calls:
            if call.untrainable is None and call.logprobs is not None:
                yield (
                    episode.index,
                    Call(
                        group_id=group.group_id,
                        prompt_ids=call.prompt_ids,
                        response_ids=call.response_ids,
                        logprobs=call.logprobs,
                        version=call.version,
                        temperature=call.temperature,
                        advantage=advantage,
                        weight=1 / len(episode.calls),
                    ),
                )


def _metrics(groups: Sequence[FinishedGroup], calls: Sequence[Call]) -> dict[str, float]:
    rewards = [reward for group in groups for reward in group.rewards]
    return {
        "groups": float(len(groups)),
        "groups_with_signal": float(sum(group.has_signal for group in groups)),
        "calls": float(len(calls)),
        "tokens_trained": float(sum(len(call.response_ids) for call in calls)),
        "reward_mean": sum(rewards) / len(rewards) if rewards else 0.0,
    }
