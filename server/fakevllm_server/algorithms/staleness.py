"""Remove stale calls from a group. A call is stale if the weights that sampled the call are too
old, compared with the current weights.

The age of weights is counted in weight versions, not in seconds. Therefore calls do not become
stale while training pauses.
"""

from __future__ import annotations

from dataclasses import replace

from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode


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
