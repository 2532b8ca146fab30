"""What the reward hook is shown of a group, and what it makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fakevllm.groups.record import GroupDraft
from fakevllm.groups.selection import failure_of, is_broken_off, with_floor
from fakevllm.hooks.recorded import messages_of
from fakevllm.hooks.results import RewardOutcome
from fakevllm.hooks.spec import Sibling
from fakevllm.hooks.worker import HookWorker
from fakevllm.transport.request import Request, SiblingResult
from fakevllm_adapters.formats.base import Answer, Json
from fakevllm_adapters.protocol.swarm import Task


async def score(
    hooks: HookWorker,
    draft: GroupDraft,
    results: Sequence[SiblingResult],
    failure_floor: float | None = None,
) -> RewardOutcome:
    """Of siblings that have answered, in order. What the engine broke off is not shown, and has no
    reward."""
    places = [at for at, one in enumerate(results) if not is_broken_off(_answer(one))]
    if not places:
        return RewardOutcome(None, "broken_off", [{} for _ in results])
    whole = [results[at] for at in places]
    siblings = [_shown(draft.request, draft.task, result) for result in whole]
    answers = [result.shown_message for result in whole]
    outcome = await hooks.reward(siblings, answers, draft.question)
    if outcome.rewards is not None:
        failures = [failure_of(_answer(one), draft.request.body) for one in whole]
        outcome = replace(outcome, rewards=with_floor(outcome.rewards, failures, failure_floor))
    return outcome if len(whole) == len(results) else _spread(outcome, places, len(results))


def _spread(outcome: RewardOutcome, places: Sequence[int], num: int) -> RewardOutcome:
    """Over all that answered."""
    rewards: list[float | None] = [None] * num
    notes: list[Json] = [{} for _ in range(num)]
    for at, note in zip(places, outcome.annotations, strict=False):
        notes[at] = note
    for at, reward in zip(places, outcome.rewards or (), strict=False):
        rewards[at] = reward
    scored = None if outcome.rewards is None else rewards
    return replace(outcome, rewards=scored, annotations=notes)


def _answer(result: SiblingResult) -> Answer:
    assert result.answer is not None, "who has not answered is not scored"
    return result.answer


def _shown(request: Request, task: Task, result: SiblingResult) -> Sibling:
    answer = _answer(result)
    episode_id = f"{request.id}/{result.index}"
    messages = messages_of(request.body)
    return Sibling(result.index, task, episode_id, answer.finish_reason, answer.usage, messages)
