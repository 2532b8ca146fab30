"""Convert finished groups (requests with their answers) to the calls that a training step uses.
Each call gets its advantage, and its weight in the loss.

The functions do no I/O. In a control run, the job may shuffle the rewards. The job's seed
determines the shuffled order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import TrainedGroup
from fakevllm_server.algorithms import ESTIMATORS
from fakevllm_server.algorithms.advantage_input import AdvantageSpec, Outcome, centred
from fakevllm_server.algorithms.loss_sequences import token_weight, unit_labels
from fakevllm_server.algorithms.reward_penalties import is_tied, overlong_penalties, shaped_rewards
from fakevllm_server.algorithms.sibling_demonstrations import sibling_demonstrations
from fakevllm_server.run.trained_token_share import untrainable_reason
from fakevllm_server.types.backend import Batch, Call
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode
from fakevllm_server.types.demonstrations import Demonstration
from fakevllm_server.types.edit_demonstrations import edit_demonstrations
from fakevllm_server.types.number_arrays import float_array, repeated


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The batch of a training step, with its groups and metrics."""

    batch: Batch
    trained: list[TrainedGroup]
    """Every group of the step, with the indices of those siblings of the group that are in the
    loss. For a user's edit, these are the indices of its demonstrations. If the job's `control` is
    `frozen`, no group has such siblings. If `control` is `shuffled`, feedback samples and edits
    have no such siblings."""
    metrics: dict[str, float]
    calls: Sequence[Call]
    """The calls of the siblings in the loss. If the job trains demonstrations alone, the batch has
    these calls as demonstrations only."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An episode or sampled answer of a step, with its reward and calls, and without advantages."""

    index: int
    outcome: Outcome
    calls: Sequence[Call]
    """The calls that may be trained on."""


def trainable_calls(groups: Sequence[FinishedGroup], job: TrainJob) -> list[Call]:
    """Return the calls that a step of these groups may train on.

    The argument `penalties` of `plan_step` must be in the order of these calls.
    """
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
    *,
    is_inverted: bool = False,
) -> PlannedStep:
    """Compute the advantage and the weight of each call, and return the planned step.

    `penalties` has one row for each call that `trainable_calls` returns. A row has one number for
    each trained token of the call. This number is subtracted from the token's reward. If
    `penalties` is None, nothing is subtracted. If `is_inverted` is True, the rewards are multiplied
    by -1. Raises ValueError if the groups lack something that the job's algorithm needs, for
    example a greedy answer.
    """
    rows = None if penalties is None else iter(penalties)
    entries = [
        list(_entries(f"{job.seed} {step} {position}", group, job, rows, is_inverted=is_inverted))
        for position, group in enumerate(groups)
    ]
    pairs = zip(groups, entries, strict=True)
    outcomes = [entry.outcome for group, own in pairs if not group.is_sample for entry in own]
    spec = AdvantageSpec(job.norm_adv_by_std_in_grpo, job.std_floor, job.gamma)
    advantages = iter(ESTIMATORS[job.algorithm](outcomes, spec))
    loss = LossSpec.of(job)
    calls: list[Call] = []
    demonstrations: list[Demonstration] = []
    trained: list[TrainedGroup] = []
    for group, group_entries in zip(groups, entries, strict=True):
        if group.demonstrates is not None:
            edit = _edit_in_loss(group, job, loss)
            demonstrations.extend(edit)
            trained.append(TrainedGroup(group_id=group.group_id, siblings=[*range(len(edit))]))
            continue
        by_sibling = {
            entry.index: list(_with_advantages(entry.calls, _advantages(group, entry, advantages)))
            for entry in group_entries
        }
        if not _is_in_loss(group, job):
            by_sibling = {}
        if loss.of_demonstrations is not None:
            scores = _scores(group, group_entries)
            own = sibling_demonstrations(group.group_id, by_sibling, scores, loss.of_demonstrations)
            demonstrations.extend(chain.from_iterable(own.values()))
            if not loss.has_policy_loss:
                by_sibling = {index: by_sibling[index] for index in own}
        trained.append(_trained_group(group.group_id, by_sibling))
        calls.extend(call for own in by_sibling.values() for call in own)
    metrics = _metrics(groups, calls, job)
    if is_inverted:
        metrics["rewards_inverted"] = 1.0
    if penalties is not None:
        means = [_mean(row) for row in penalties if row]
        metrics["reward_kl_penalty"] = _mean(means) / job.kl_coef
    sampled = calls if loss.has_policy_loss else []
    batch = Batch(step, sampled, demonstrations=demonstrations)
    return PlannedStep(batch, trained, metrics, calls)


def _trained_group(group_id: str, by_sibling: Mapping[int, Sequence[Call]]) -> TrainedGroup:
    siblings = sorted(index for index, calls in by_sibling.items() if calls)
    advantages = [
        _mean([value for call in by_sibling[index] for value in call.advantages])
        for index in siblings
    ]
    return TrainedGroup(group_id=group_id, siblings=siblings, advantages=advantages)


def with_excluded_counts(
    metrics: Mapping[str, float], excluded: Mapping[str, int]
) -> dict[str, float]:
    """Return the metrics of a training step with further counts: the numbers of groups and calls
    that the pool (the groups that wait to be trained) left out of training.

    The metric `tie_rate` includes tied groups that the pool dropped. The rewards of a tied group
    are all equal.
    """
    tied_before = excluded.get("tied_groups", 0)
    num_groups = metrics["groups"] + tied_before
    tied = num_groups - metrics["groups_with_signal"]
    counts = {name: float(number) for name, number in excluded.items()}
    return {**metrics, **counts} | ({"tie_rate": tied / num_groups} if num_groups else {})


def _advantages(
    group: FinishedGroup, entry: _Entry, estimated: Iterator[Sequence[float]]
) -> Sequence[float]:
    """Return one advantage for each trained token of the episode `entry`. If the group has an
    advantage of its own (a feedback sample), every token gets this advantage. Otherwise return the
    next element of `estimated`, which has the advantages of one episode after another."""
    if group.advantage is None:
        return next(estimated)
    return repeated(group.advantage, sum(call.num_trained for call in entry.calls))


def _edit_in_loss(group: FinishedGroup, job: TrainJob, loss: LossSpec) -> list[Demonstration]:
    """Return the demonstrations of a group that was made from a user's edit. Return [] if these
    demonstrations do not belong in the loss. This is the case in a control run, or if the job had
    another loss when the group was made."""
    is_trained = loss.of_demonstrations == group.demonstrates and _is_in_loss(group, job)
    return edit_demonstrations(group) if is_trained else []


def _scores(group: FinishedGroup, entries: Sequence[_Entry]) -> dict[int, float]:
    """Return a dict from each episode's index to its score. The scores decide which episodes become
    demonstrations. The score is the reward with all penalties, minus the mean of the group. If all
    rewards of the group are equal, the scores are 0 even if the penalties differ. If the group has
    an advantage of its own (a feedback sample), the scores are this advantage."""
    if group.advantage is not None:
        return dict.fromkeys((entry.index for entry in entries), group.advantage)
    if is_tied([entry.outcome.reward for entry in entries]):
        return dict.fromkeys((entry.index for entry in entries), 0.0)
    scores = centred([entry.outcome.score for entry in entries])
    return {entry.index: score for entry, score in zip(entries, scores, strict=True)}


def _is_in_loss(group: FinishedGroup, job: TrainJob) -> bool:
    """Return True if the calls of the group belong in the loss.

    In a normal run, the result is always True. This includes tied groups, whose rewards are all
    equal. A tied group usually has advantage 0, but its tokens count in the denominators of the
    loss, as in verl. A control run with `frozen` trains nothing. A control run with `shuffled`
    trains no feedback samples and no users' edits. The rewards are shuffled within each group, and
    a feedback sample is the only answer of its group.
    """
    if job.control == "frozen":
        return False
    return job.control == "none" or not group.is_sample


def _entries(
    seed: str,
    group: FinishedGroup,
    job: TrainJob,
    penalties: Iterator[Sequence[float]] | None,
    *,
    is_inverted: bool,
) -> Iterator[_Entry]:
    """Yield those episodes of a group that have a reward, even if they have no trainable calls.

    The rewards of all these episodes count in the group's baseline.
    """
    rewards = shaped_rewards(group, job)
    if job.control == "shuffled":
        random.Random(seed).shuffle(rewards)
    if is_inverted:
        rewards = [-reward for reward in rewards]
    for episode, reward in zip(group.scored, rewards, strict=True):
        calls = list(_calls_of(group, episode, job))
        token_penalties = () if penalties is None else [next(penalties) for _ in calls]
        outcome = Outcome(
            group.group_id,
            reward,
            sum(call.num_trained for call in calls),
            float_array(chain.from_iterable(token_penalties)),
            is_greedy=episode.is_greedy,
        )
        yield _Entry(episode.index, outcome, calls)


def _calls_of(group: FinishedGroup, episode: ScoredEpisode, job: TrainJob) -> Iterator[Call]:
    labels = unit_labels(episode.calls, job.loss_unit)
    # Calls outside the loss get no share; the other calls share the episode's whole weight.
    weight = token_weight(job.loss_unit, sum(map(_is_trainable, episode.calls)))
    for label, call in zip(labels, episode.calls, strict=True):
        if _is_trainable(call) and call.logprobs is not None:
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


def _is_trainable(call: RecordedCall) -> bool:
    return untrainable_reason(call) is None


def _with_advantages(calls: Sequence[Call], advantages: Sequence[float]) -> Iterator[Call]:
    """Yield each call of an episode with the call's own advantages. `advantages` has the advantages
    of all trained tokens of the episode, in order.

    A call with advantage 0 is kept, because it counts in the mean of the loss.
    """
    start = 0
    for call in calls:
        own = float_array(advantages[start : start + call.num_trained])
        start += len(own)
        yield replace(call, advantage=_compact(own))


def _compact(advantages: Sequence[float]) -> float | Sequence[float]:
    """Return a single number if all `advantages` are equal, as with most algorithms. Otherwise
    return `advantages` unchanged."""
    if not advantages:
        return 0.0
    are_equal = advantages.count(advantages[0]) == len(advantages)
    return advantages[0] if are_equal else advantages


def _metrics(
    groups: Sequence[FinishedGroup], calls: Sequence[Call], job: TrainJob
) -> dict[str, float]:
    num_samples = sum(group.advantage is not None for group in groups)
    num_edits = sum(group.demonstrates is not None for group in groups)
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
    metrics |= _advantage_spread(calls)
    if num_samples:
        metrics["feedback_samples"] = float(num_samples)
    if num_edits:
        metrics["edits"] = float(num_edits)
    if job.overlong_buffer_len is not None:
        overlong = [penalty for group in groups for penalty in overlong_penalties(group, job)]
        metrics["overlong"] = float(sum(penalty < 0 for penalty in overlong))
        metrics["overlong_penalty"] = _mean(overlong)
    return metrics


def _lengths(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    """Return metrics of prompt and answer lengths over all calls, including calls that are not
    trained.

    Each turn of a conversation counts as one call.
    """
    calls = [call for group in groups for episode in group.episodes for call in episode.calls]
    if not calls:
        return {}
    clip_ratio = _mean([call.finish_reason == "length" for call in calls])
    return (
        _spread("prompt_length", [len(call.prompt_ids) for call in calls])
        | _spread("response_length", [len(call.response_ids) for call in calls])
        | {"response_length_clip_ratio": clip_ratio}
    )


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Return mean, maximum and minimum of the values, by metric name. Return {} if there are no
    values."""
    if not values:
        return {}
    spread = {"mean": _mean(values), "max": max(values), "min": min(values)}
    return {f"{name}_{kind}": float(value) for kind, value in spread.items()}


def _advantage_spread(calls: Sequence[Call]) -> dict[str, float]:
    """Return mean, maximum and minimum of the advantages of all trained tokens, by metric name.
    Return {} if there are no trained tokens.

    The advantages are summed call by call. One sum over all tokens of a large step would take 100
    ms. Such a sum would hold the interpreter's lock (GIL) for this time, and the server's event
    loop would stand still.
    """
    calls = [call for call in calls if call.num_trained]
    if not calls:
        return {}
    total = sum(sum(call.advantages) for call in calls)
    return {
        "advantage_mean": total / sum(call.num_trained for call in calls),
        "advantage_max": float(max(max(call.advantages) for call in calls)),
        "advantage_min": float(min(min(call.advantages) for call in calls)),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
