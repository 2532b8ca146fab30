"""From finished groups to the calls a step trains on. Pure; the seed decides what is shuffled."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import TrainedGroup
from fakevllm_server.algorithms import ESTIMATORS
from fakevllm_server.algorithms.loss_units import token_weight, unit_labels
from fakevllm_server.algorithms.outcome import AdvantageSpec, Outcome
from fakevllm_server.algorithms.shaping import is_tied, overlong_penalties, shaped_rewards
from fakevllm_server.forest.drift import Cause, SessionCall, causes, drift_metrics
from fakevllm_server.forest.history import Vocabulary
from fakevllm_server.run.coverage import untrainable_reason
from fakevllm_server.types.backend import Batch, Call
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode

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


@dataclass(frozen=True, slots=True)
class _Entry:
    """A scored episode of a step."""

    index: int
    outcome: Outcome
    calls: Sequence[Call]
    """Those that may train; their advantage is not known yet."""


def trainable_calls(groups: Sequence[FinishedGroup], job: TrainJob) -> list[Call]:
    """All that a step of these groups may train on, in the order of `penalties` in `plan_step`."""
    return [
        call
        for group in groups
        for episode in group.scored
        for call in _calls_of(group, episode, job)
    ]


def plan_step(
    step: int,
    groups: Sequence[FinishedGroup],
    job: TrainJob,
    penalties: Sequence[Sequence[float]] | None = None,
) -> PlannedStep:
    """`penalties`: what is taken from the reward of each trained token of each of
    `trainable_calls`, if anything is. Raises ValueError where an algorithm lacks what it needs."""
    rows = None if penalties is None else iter(penalties)
    entries = [
        list(_entries(f"{job.seed} {step} {place}", group, job, rows))
        for place, group in enumerate(groups)
    ]
    compared = zip(groups, entries, strict=True)
    outcomes = [one.outcome for group, own in compared if not group.is_sample for one in own]
    spec = AdvantageSpec(job.norm_adv_by_std_in_grpo, job.std_floor, job.gamma)
    advantages = iter(ESTIMATORS[job.algorithm](outcomes, spec))
    calls: list[Call] = []
    trained: list[TrainedGroup] = []
    for group, of_group in zip(groups, entries, strict=True):
        own = {
            entry.index: list(_with(entry.calls, _advantages(group, entry, advantages)))
            for entry in of_group
        }
        if not _teaches(group, [entry.outcome.score for entry in of_group], job):
            own = {}
        trained.append(_trained_group(group.group_id, own))
        calls.extend(call for given in own.values() for call in given)
    metrics = _metrics(groups, calls, job)
    if penalties is not None:
        means = [_mean(row) for row in penalties if row]
        metrics["reward_kl_penalty"] = _mean(means) / job.kl_coef
    return PlannedStep(Batch(step, calls), trained, metrics)


def _trained_group(group_id: str, given: Mapping[int, Sequence[Call]]) -> TrainedGroup:
    """`given`: of each sibling, the calls that train."""
    siblings = sorted(index for index, calls in given.items() if calls)
    advantages = [_mean([one for call in given[i] for one in call.advantages]) for i in siblings]
    return TrainedGroup(group_id=group_id, siblings=siblings, advantages=advantages)


def with_left_out(metrics: Mapping[str, float], left_out: Mapping[str, int]) -> dict[str, float]:
    """A step's metrics with what the pool kept from it; the groups it left out as tied were ties
    too."""
    tied_before = left_out.get("tied_groups", 0)
    num_groups = metrics["groups"] + tied_before
    tied = num_groups - metrics["groups_with_signal"]
    told = {name: float(number) for name, number in left_out.items()}
    return {**metrics, **told} | ({"tie_rate": tied / num_groups} if num_groups else {})


def _advantages(
    group: FinishedGroup, entry: _Entry, compared: Iterator[Sequence[float]]
) -> Sequence[float]:
    """Of each trained token of an episode."""
    if group.advantage is None:
        return next(compared)
    return [group.advantage] * sum(call.num_trained for call in entry.calls)


def _teaches(group: FinishedGroup, scores: Sequence[float], job: TrainJob) -> bool:
    """KL and entropy pull on every call, a tied group's too; some advantages of ties are not 0. A
    sample has nothing to be shuffled with: an experiment that must not learn leaves it out."""
    if group.is_sample:
        return job.control == "none"
    pulls = job.kl_loss_coef > 0 or job.entropy_coeff > 0 or job.algorithm in TEACHES_TIES
    return job.control != "frozen" and (pulls or not is_tied(scores))


def _entries(
    seed: str,
    group: FinishedGroup,
    job: TrainJob,
    penalties: Iterator[Sequence[float]] | None,
) -> Iterator[_Entry]:
    """Masked calls still count in their group's baseline, through their episode's reward."""
    rewards = shaped_rewards(group, job)
    if job.control == "shuffled":
        random.Random(seed).shuffle(rewards)
    for episode, reward in zip(group.scored, rewards, strict=True):
        calls = list(_calls_of(group, episode, job))
        taken = () if penalties is None else [next(penalties) for _ in calls]
        outcome = Outcome(
            group.group_id,
            reward,
            sum(call.num_trained for call in calls),
            list(chain.from_iterable(taken)),
            is_greedy=episode.is_greedy,
        )
        yield _Entry(episode.index, outcome, calls)


def _calls_of(group: FinishedGroup, episode: ScoredEpisode, job: TrainJob) -> Iterator[Call]:
    labels = unit_labels(episode.calls, job.loss_unit)
    # Calls that are in no loss have no vote: the others have all of their episode's.
    weight = token_weight(job.loss_unit, sum(map(_trained, episode.calls)))
    for label, call in zip(labels, episode.calls, strict=True):
        if _trained(call) and call.logprobs is not None:
            yield Call(
                group_id=group.group_id,
                prompt_ids=call.prompt_ids,
                response_ids=call.response_ids,
                logprobs=call.logprobs,
                version=call.version,
                temperature=call.temperature,
                advantage=0.0,
                weight=weight,
                unit=f"{group.group_id} {episode.index} {label}",
                allowed=call.allowed,
            )


def _trained(call: RecordedCall) -> bool:
    return untrainable_reason(call) is None


def _with(calls: Sequence[Call], advantages: Sequence[float]) -> Iterator[Call]:
    """Each with its own part of its episode's. A call of advantage 0 stays: it is one of those the
    loss is the mean of."""
    at = 0
    for call in calls:
        own = advantages[at : at + call.num_trained]
        at += len(own)
        yield replace(call, advantage=_one_or_each(own))


def _one_or_each(advantages: Sequence[float]) -> float | Sequence[float]:
    """Most algorithms give all tokens of an episode the same."""
    if not advantages:
        return 0.0
    are_equal = advantages.count(advantages[0]) == len(advantages)
    return advantages[0] if are_equal else advantages


def _metrics(
    groups: Sequence[FinishedGroup], calls: Sequence[Call], job: TrainJob
) -> dict[str, float]:
    num_samples = sum(group.is_sample for group in groups)
    groups = [group for group in groups if not group.is_sample]
    rewards = [reward for group in groups for reward in group.rewards]
    have_signal = [not is_tied(shaped_rewards(group, job)) for group in groups]
    metrics = {
        "groups": float(len(groups)),
        "groups_with_signal": float(sum(have_signal)),
        "calls": float(len(calls)),
        "tokens_trained": float(sum(call.num_trained for call in calls)),
        "tokens_forced": float(sum(len(call.response_ids) - call.num_trained for call in calls)),
    }
    metrics |= _spread("reward", rewards) | _lengths(groups)
    metrics |= _spread("advantage", [one for call in calls for one in call.advantages])
    if num_samples:
        metrics["feedback_samples"] = float(num_samples)
    if job.overlong_buffer_len is not None:
        overlong = [penalty for group in groups for penalty in overlong_penalties(group, job)]
        metrics["overlong"] = float(sum(penalty < 0 for penalty in overlong))
        metrics["overlong_penalty"] = _mean(overlong)
    return metrics


def _lengths(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    """Of all calls, trained or not; a turn of a conversation is one."""
    calls = [call for group in groups for episode in group.episodes for call in episode.calls]
    if not calls:
        return {}
    cut = _mean([call.finish_reason == "length" for call in calls])
    return (
        _spread("prompt_length", [len(call.prompt_ids) for call in calls])
        | _spread("response_length", [len(call.response_ids) for call in calls])
        | {"response_length_clip_ratio": cut}
    )


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Nothing of nothing."""
    if not values:
        return {}
    found = {"mean": _mean(values), "max": max(values), "min": min(values)}
    return {f"{name}_{kind}": float(value) for kind, value in found.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# Why sessions branch: calls that do not go on where an earlier one ended. Pure.
#
# An active episode is one session, its calls in the order they were made. A passive group's
# siblings have one prompt, the next turn of a conversation; what came before it, the proxy tells
# (`FinishedGroup.follows`). Where that is not known, a group is not looked at.

MAX_TOKENS = 1_000_000
"""Of a step's calls that are read as text: a step is told when they all are."""


def branches(
    groups: Sequence[FinishedGroup], vocabulary: Vocabulary | None = None
) -> dict[str, float]:
    """`branch_<cause>` for every cause that occurred, `drift_rate`, and `branch_rate`: the share of
    later calls that do not extend an earlier one; no rate where none is later. Without a vocabulary
    whatever needs text is `unknown`; what is beyond MAX_TOKENS is `not_read`."""
    found = causes(_of_episodes(groups), vocabulary, MAX_TOKENS)
    # The first of each pair was counted with its own group, or was never captured.
    found += causes(_of_turns(groups), vocabulary, MAX_TOKENS)[1::2]
    later = [cause for cause in found if cause is not Cause.FIRST]
    branched = sum(cause is not Cause.EXTENDS for cause in later)
    rate = {"branch_rate": branched / len(later)} if later else {}
    return {**drift_metrics(found), **rate}


def _of_episodes(groups: Sequence[FinishedGroup]) -> list[SessionCall]:
    return [
        SessionCall((group.group_id, episode.index), number, call.prompt_ids, call.response_ids)
        for group in groups
        for episode in group.episodes
        if len(episode.calls) > 1
        for number, call in enumerate(episode.calls)
    ]


def _of_turns(groups: Sequence[FinishedGroup]) -> list[SessionCall]:
    """Pairs: the served call before, and the group's own prompt."""
    pairs: list[SessionCall] = []
    for group in groups:
        own = [call for episode in group.episodes for call in episode.calls]
        if group.follows is not None and own:
            pairs += [
                SessionCall(group.group_id, number, call.prompt_ids, call.response_ids)
                for number, call in enumerate((group.follows, own[0]))
            ]
    return pairs
