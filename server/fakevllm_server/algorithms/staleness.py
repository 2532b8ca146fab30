"""Removes calls that were sampled by old weights.

Age is counted in weight versions, not in seconds. A call does not become stale while no step is
trained.
"""

from __future__ import annotations

from dataclasses import replace

from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode


def keep_fresh(group: FinishedGroup, version: int, max_staleness: int) -> tuple[FinishedGroup, int]:
    """Return the group without its stale calls, and the number of calls removed.

    A call is stale if weights older than `version` − `max_staleness` sampled at least one of its
    tokens. An episode that loses all of its calls is removed with its reward, so that the remaining
    episodes are compared only with each other.
    """
    episodes: list[ScoredEpisode] = []
    num_dropped = 0
    for episode in group.episodes:
        fresh = [call for call in episode.calls if version - call.version <= max_staleness]
        num_dropped += len(episode.calls) - len(fresh)
        if fresh or not episode.calls:
            episodes.append(replace(episode, calls=fresh))
    return replace(group, episodes=episodes), num_dropped
