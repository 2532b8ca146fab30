"""Decide which groups are pooled. A pooled group waits to be trained. This module does no I/O.

A group is pooled if its rewards can be compared. In a partial group, some siblings (answers of the
group) have no reward, for example because a hook failed. Only the siblings with rewards are then
compared. A group with a single reward is not trained. If all rewards are equal, the group is tied
and has no signal. The job's setting `filter_groups` then decides:

* `keep`: the group is trained with advantage 0. The group itself then changes the loss only through
  its KL and entropy. As in verl, the tokens of the group count in the denominators of the loss,
  which lowers the weight of the other groups.
* `drop`: the group is dropped, and the step may have fewer groups.
* `collect`: the group is dropped, and the step waits for another group, within the limit
  `max_num_gen_batches`.
"""

from __future__ import annotations

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.algorithms import NEEDS_GREEDY
from fakevllm_server.algorithms.reward_penalties import is_tied, shaped_rewards
from fakevllm_server.types.calls import FinishedGroup
from fakevllm_server.types.drop_reasons import DropReason

TIED = "tied"
"""Reason for not training a group whose rewards are all equal, if the job's `filter_groups` leaves
such groups out."""
FULL = DropReason.POOL_FULL.value
"""Reason for dropping a group because the pool was full."""
REJECTED_VERSION = "rejected_version"
"""Reason for dropping a group in two cases. Either a rejected version of the weights sampled a
token of the group, or the group was trained in a step that was discarded with a rejected
version."""
UNVERIFIED = "unverified_weights"
"""Reason for dropping a group that was sampled while the weights in the engine were not those of
the version that the engine reported."""
NO_LOSS = "no_demonstration_loss"
"""Reason for not pooling a user's edit that the job's loss does not train."""
NON_DUMMY = "rollout_until_finish_enough_non_dummy_tasks"
"""AgentJet's sample-collection method that collects until enough groups are not tied. The rewards
within such a group are not all equal."""


def why_not_pooled(group: FinishedGroup, job: TrainJob) -> str | None:
    """Return the reason why a group is not pooled (kept for training), or None if the group is
    pooled."""
    if group.demonstrates is not None:
        is_loss = group.demonstrates in (job.loss, job.demonstration_loss)
        return None if is_loss else f"{NO_LOSS}: the job has no loss {group.demonstrates}"
    reason = _why_untrainable(group)
    if group.is_sample:
        return reason
    needs_greedy = job.algorithm in NEEDS_GREEDY
    if reason is None and needs_greedy and not any(episode.is_greedy for episode in group.scored):
        return DropReason.NO_GREEDY_ANSWER.value
    if reason is None and filtering(job) != "keep" and is_tied(shaped_rewards(group, job)):
        return TIED
    return reason


def filtering(job: TrainJob) -> str:
    """Return how a job treats groups whose rewards are all equal: `keep`, `drop` or `collect`.

    The result is the job's setting `filter_groups`, with one exception: AgentJet's
    sample-collection method NON_DUMMY always means `collect`.
    """
    method = job.swarm_mode_sample_collection_method
    return "collect" if method == NON_DUMMY else job.filter_groups


def _why_untrainable(group: FinishedGroup) -> str | None:
    if len(group.rewards) < 2 and not group.is_sample:
        return DropReason.FEWER_THAN_TWO_REWARDS.value
    if not any(episode.trains for episode in group.episodes):
        reasons = {call.untrainable for e in group.episodes for call in e.calls if call.untrainable}
        return DropReason.NO_TRAINABLE_CALL.value + (
            f": {'; '.join(sorted(reasons))}" if reasons else ""
        )
    return None
