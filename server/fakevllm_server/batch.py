"""From finished groups to the calls a step trains on. Pure; the seed decides what is shuffled."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fakevllm_adapters.swarm import TrainedGroup
from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.algorithms import ESTIMATORS
from fakevllm_server.algorithms.loss_units import token_weight, unit_labels
from fakevllm_server.algorithms.outcome import AdvantageSpec, Outcome
from fakevllm_server.backends.base import Batch, Call
from fakevllm_server.calls import FinishedGroup, RecordedCall, ScoredEpisode

TEACHES_TIES = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Algorithms whose advantages are not 0 where a group's rewards are equal."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A batch and what went into it."""

    batch: Batch
    trained: list[TrainedGroup]
    """Every group of the step; `siblings` are those in its loss: none for a tied group where only
    rewards teach, none for control `frozen`."""
    metrics: dict[str, float]


def plan_step(step: int, groups: Sequence[FinishedGroup], job: TrainJob) -> PlannedStep:
    """Raises ValueError where an algorithm lacks what it needs."""
    advantages = _advantages(step, groups, job)
    calls: list[Call] = []
    trained: list[TrainedGroup] = []
    for group in groups:
        teaches = _teaches(group, job)
        own = [
            (episode.index, call)
            for episode in (_scored(group) if teaches else [])
            for call in _calls_of(group, episode, advantages[group.group_id, episode.index], job)
        ]
        calls.extend(call for _, call in own)
        trained.append(
            TrainedGroup(group_id=group.group_id, siblings=sorted({index for index, _ in own}))
        )
    return PlannedStep(Batch(step, calls), trained, _metrics(groups, calls))


def _teaches(group: FinishedGroup, job: TrainJob) -> bool:
    """KL and entropy pull on every call, a tied group's too; some advantages of ties are not 0."""
    pulls = job.kl_loss_coef > 0 or job.entropy_coeff > 0 or job.algorithm in TEACHES_TIES
    return job.control != "frozen" and (group.has_signal or pulls)


def _scored(group: FinishedGroup) -> list[ScoredEpisode]:
    return [episode for episode in group.episodes if episode.reward is not None]


def _trained(call: RecordedCall) -> bool:
    return call.untrainable is None and call.logprobs is not None


def _advantages(
    step: int, groups: Sequence[FinishedGroup], job: TrainJob
) -> dict[tuple[str, int], float]:
    """Of each scored episode. Masked calls still count in their group's baseline, through their
    episode's reward."""
    places: list[tuple[str, int]] = []
    outcomes: list[Outcome] = []
    for group in groups:
        rewards = group.rewards
        if job.control == "shuffled":
            random.Random(f"{job.seed} {step} {group.group_id}").shuffle(rewards)
        for episode, reward in zip(_scored(group), rewards, strict=True):
            places.append((group.group_id, episode.index))
            outcomes.append(_outcome(group, episode, reward))
    spec = AdvantageSpec(job.norm_adv_by_std_in_grpo, job.std_floor)
    found = ESTIMATORS[job.algorithm](outcomes, spec)
    # Without a discount and penalties all tokens of an episode have the same.
    return {place: own[0] if own else 0.0 for place, own in zip(places, found, strict=True)}


def _outcome(group: FinishedGroup, episode: ScoredEpisode, reward: float) -> Outcome:
    return Outcome(
        group.group_id,
        reward,
        sum(len(call.response_ids) for call in episode.calls if _trained(call)),
        is_greedy=episode.is_greedy,
    )


def _calls_of(
    group: FinishedGroup, episode: ScoredEpisode, advantage: float, job: TrainJob
) -> Iterator[Call]:
    """A call of advantage 0 stays: it is one of those the loss is the mean of."""
    labels = unit_labels(episode.calls, job.loss_unit)
    for label, call in zip(labels, episode.calls, strict=True):
        if _trained(call) and call.logprobs is not None:
            yield Call(
                group_id=group.group_id,
                prompt_ids=call.prompt_ids,
                response_ids=call.response_ids,
                logprobs=call.logprobs,
                version=call.version,
                temperature=call.temperature,
                advantage=advantage,
                weight=token_weight(job.loss_unit, len(episode.calls)),
                unit=f"{group.group_id} {episode.index} {label}",
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
