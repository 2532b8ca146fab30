"""Removal of stale calls from a group. A call is stale if weights that are too old sampled it.

Age is counted in weight versions, not in seconds. Therefore no call becomes stale while no step is
trained.
"""

from __future__ import annotations

from dataclasses import replace

from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode


def keep_fresh(group: FinishedGroup, version: int, max_staleness: int) -> tuple[FinishedGroup, int]:
    """Return two values: the group without its stale calls, and the number of calls removed.

    A call is stale if at least one of its tokens was sampled by weights with a version below
    `version` − `max_staleness`. If all calls of an episode are stale, the episode is removed
    together with its reward. The remaining episodes of the group are then compared only with each
    other.
    """
    episodes: list[ScoredEpisode] = []
    num_dropped = 0
    for episode in group.episodes:
        fresh = [call for call in episode.calls if version - call.version <= max_staleness]
        num_dropped += len(episode.calls) - len(fresh)
        if fresh or not episode.calls:
            episodes.append(replace(episode, calls=fresh))
    return replace(group, episodes=episodes), num_dropped
