"""Score the siblings of one request with the reward hook. Siblings are the sampled answers, and the
hook is a function of the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fakevllm.groups.group_record import GroupDraft
from fakevllm.groups.hook_warnings import REWARD
from fakevllm.groups.sibling_selection import failure_of, is_broken_off, with_floor
from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.recorded_group import messages_of
from fakevllm.hooks.results import RewardOutcome
from fakevllm.hooks.spec import Sibling
from fakevllm.transport.request import Request, SiblingResult
from fakevllm_adapters.formats.base import Answer, Json
from fakevllm_adapters.protocol.swarm import Task


async def score(
    hooks: HookWorker,
    draft: GroupDraft,
    results: Sequence[SiblingResult],
    failure_floor: float | None = None,
) -> RewardOutcome:
    """Call the reward hook with the siblings (sampled answers) that are complete, and return the
    hook's result. The rewards are in the order of `results`.

    An answer that the engine did not complete is not passed to the hook and has no reward. The
    setting `failure_floor` is for answers that the model itself made unusable, for example because
    they reached the token limit. Such an answer gets the lower of two rewards: `failure_floor`, or
    the lowest reward of the usable answers. If `failure_floor` is None, such an answer keeps the
    reward that the hook gave it.
    """
    positions = [i for i, result in enumerate(results) if not is_broken_off(_answer(result))]
    if not positions:
        return RewardOutcome(None, "broken_off", [{} for _ in results])
    complete = [results[i] for i in positions]
    siblings = [_sibling(draft.request, draft.task, result) for result in complete]
    answers = [result.shown_message for result in complete]
    trace = draft.request.trace
    hook = None if trace is None else trace.begin_hook(REWARD.name)
    outcome = await hooks.reward(siblings, answers, draft.question)
    if trace is not None and hook is not None:
        trace.end_hook(hook, outcome.reason, outcome.hook_hash)
    if outcome.rewards is not None and failure_floor is not None:
        failures = [failure_of(_answer(result), draft.request.body) for result in complete]
        outcome = replace(outcome, rewards=with_floor(outcome.rewards, failures, failure_floor))
    return outcome if len(complete) == len(results) else _spread(outcome, positions, len(results))


def _spread(outcome: RewardOutcome, positions: Sequence[int], num: int) -> RewardOutcome:
    """Extend the result of a hook call to all `num` siblings (sampled answers), and return the
    extended result. The hook scored only some of them.

    `outcome` is the hook's result. `positions` has the position of each scored sibling in the list
    of all siblings. A sibling that was not scored gets the reward None.
    """
    rewards: list[float | None] = [None] * num
    annotations: list[Json] = [{} for _ in range(num)]
    for position, annotation in zip(positions, outcome.annotations, strict=False):
        annotations[position] = annotation
    for position, reward in zip(positions, outcome.rewards or (), strict=False):
        rewards[position] = reward
    return replace(
        outcome,
        rewards=None if outcome.rewards is None else rewards,
        annotations=annotations,
    )


def _answer(result: SiblingResult) -> Answer:
    assert result.answer is not None, "only siblings that have answered are scored"
    return result.answer


def _sibling(request: Request, task: Task, result: SiblingResult) -> Sibling:
    """Return a sibling (a sampled answer) in the form in which the reward hook gets it."""
    answer = _answer(result)
    episode_id = f"{request.id}/{result.index}"
    messages = messages_of(request.body)
    return Sibling(result.index, task, episode_id, answer.finish_reason, answer.usage, messages)
