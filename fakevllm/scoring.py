"""What the reward hook is shown of a group, and what it makes of it."""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm.group import GroupDraft
from fakevllm.hooks.outcomes import RewardOutcome
from fakevllm.hooks.recorded import messages_of
from fakevllm.hooks.spec import Sibling
from fakevllm.hooks.worker import HookWorker
from fakevllm.siblings import Request, SiblingResult
from fakevllm_adapters.swarm import Task


async def score(
    hooks: HookWorker, draft: GroupDraft, results: Sequence[SiblingResult]
) -> RewardOutcome:
    """Of siblings that have answered, in order."""
    siblings = [_shown(draft.request, draft.task, result) for result in results]
    answers = [result.shown_message for result in results]
    return await hooks.reward(siblings, answers, draft.question)


def _shown(request: Request, task: Task, result: SiblingResult) -> Sibling:
    answer = result.answer
    assert answer is not None, "who has not answered is not scored"
    episode_id = f"{request.id}/{result.index}"
    messages = messages_of(request.body)
    return Sibling(result.index, task, episode_id, answer.finish_reason, answer.usage, messages)
