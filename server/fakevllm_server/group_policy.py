"""Which groups a step may be made of. Pure.

A partial group is compared as far as it has rewards: a sibling without one has failed for reasons
that are not the model's. One reward alone is compared with nothing. Where all are equal there is no
signal: the group is a part of its step and teaches nothing, unless KL or entropy pull on it too;
with `filter_groups` it is dropped, and the step is filled with others.
"""

from __future__ import annotations

from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.algorithms import NEEDS_GREEDY
from fakevllm_server.algorithms.shaping import is_tied, shaped_rewards
from fakevllm_server.calls import FinishedGroup

TIED = "tied"


def why_not_pooled(group: FinishedGroup, job: TrainJob) -> str | None:
    """None where it is."""
    reason = _why_untrainable(group)
    if group.is_sample:
        return reason
    needs_greedy = job.algorithm in NEEDS_GREEDY
    if reason is None and needs_greedy and not any(one.is_greedy for one in group.scored):
        return "no_greedy_answer"
    if reason is None and job.filter_groups and is_tied(shaped_rewards(group, job)):
        return TIED
    return reason


def _why_untrainable(group: FinishedGroup) -> str | None:
    if len(group.rewards) < 2 and not group.is_sample:
        return "fewer_than_two_rewards"
    if not any(episode.trains for episode in group.episodes):
        reasons = {call.untrainable for e in group.episodes for call in e.calls if call.untrainable}
        return "no_trainable_call" + (f": {'; '.join(sorted(reasons))}" if reasons else "")
    return None
