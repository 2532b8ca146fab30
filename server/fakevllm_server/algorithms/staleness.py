"""Remove stale calls from a group, and measure how old the trained calls are. A call is stale if
the weights that sampled the call are too old, compared with the current weights.

The age of weights is counted in weight versions, not in seconds. Therefore calls do not become
stale while training pauses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fakevllm_server.types.backend import Call
from fakevllm_server.types.calls import (
    LOGGED_VERSION,
    FinishedGroup,
    RecordedCall,
    ScoredEpisode,
)

SEVERAL_VERSIONS = "several_versions: the weights changed while the answer was sampled"
"""Reason for not training a call with tokens of several versions, if the job has `async_steps`."""


def keep_fresh(group: FinishedGroup, version: int, max_staleness: int) -> tuple[FinishedGroup, int]:
    """Return the group without its stale calls, and the number of removed calls.

    A call is stale if at least one of its tokens was sampled with weights of a version below
    `version` − `max_staleness`. If all calls of an episode are stale, the whole episode with its
    reward is removed. The removed episode does not count in the baseline of the group's other
    episodes.
    """
    episodes: list[ScoredEpisode] = []
    num_dropped = 0
    for episode in group.episodes:
        fresh = [call for call in episode.calls if version - call.version <= max_staleness]
        num_dropped += len(episode.calls) - len(fresh)
        if fresh or not episode.calls:
            episodes.append(replace(episode, calls=fresh))
    return replace(group, episodes=episodes), num_dropped


def only_one_version(call: RecordedCall) -> RecordedCall:
    """Return the call. If weights of several versions may have sampled its tokens, the returned
    call is untrainable."""
    is_mixed = len({span.version for span in call.versions}) > 1
    if not is_mixed or call.untrainable is not None:
        return call
    return replace(call, untrainable=SEVERAL_VERSIONS)


def staleness_metrics(calls: Sequence[Call], version: int) -> dict[str, float]:
    """Return mean and maximum age of the calls of a step, in versions. `version` is the version of
    the weights that the step trains. Logged calls (of an earlier run) have no age. Return {} if
    there are no other calls.
    """
    ages = [version - call.version for call in calls if call.version != LOGGED_VERSION]
    if not ages:
        return {}
    return {"staleness_mean": sum(ages) / len(ages), "staleness_max": float(max(ages))}
