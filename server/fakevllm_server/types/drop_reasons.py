"""Slugs with which the server's reasons for dropping groups begin."""

from __future__ import annotations

from enum import StrEnum


class DropReason(StrEnum):
    """Reasons why the server does not train a group, or why its training was undone."""

    FEWER_THAN_TWO_REWARDS = "fewer_than_two_rewards"
    """The group has one reward or none, so nothing can be compared."""
    NO_TRAINABLE_CALL = "no_trainable_call"
    """None of the group's calls can be trained. The details are the reasons of the calls."""
    NO_GREEDY_ANSWER = "no_greedy_answer"
    """The algorithm is `remax`, and the group has no greedy answer."""
    POOL_FULL = "pool_full"
    """The server held too many groups, and the oldest were dropped."""
    NEVER_ENDED = "never_ended"
    """The proxy sent no rewards of the group within an hour after its last call."""
    PARTIAL = "partial"
    """Some episodes of the task never arrived, and the job sets `partial_tasks` to `drop`."""
    STALE = "stale"
    """Without the calls of old weights, fewer than two rewards are left."""
    STEP_FAILED = "step_failed"
    """The training step with the group failed several times."""
    TRAINING_STOPPED = "training_stopped"
    """Training has stopped because of trouble, which the server's log names."""
    TRAINING_REFUSED = "training_refused"
    """The trainer refuses the job. `fakevllm status` gives the reason."""
    UNKNOWN_GROUP = "unknown_group"
    """The server does not know the group."""
    GONE_BACK = "gone_back"
    """`fakevllm-server checkpoints restore` went back to a step before the group."""
    LOST_WITH_CHECKPOINT = "lost_with_checkpoint"
    """The checkpoint with the group's training was lost, and later batches were deleted already."""
