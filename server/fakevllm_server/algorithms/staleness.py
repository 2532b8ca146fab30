"""How old what was sampled is, in weight versions: quiet traffic does not go stale."""

from __future__ import annotations

from dataclasses import replace

from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode


def keep_fresh(group: FinishedGroup, version: int, max_staleness: int) -> tuple[FinishedGroup, int]:
    """The group without calls that weights older than `version` − `max_staleness` had a part in,
    and how many those were.

    Calls are dropped, not groups; an episode that loses all of its calls takes its reward with it,
    so that the rest is compared with each other alone.
    """
    episodes: list[ScoredEpisode] = []
    num_dropped = 0
    for episode in group.episodes:
        fresh = [call for call in episode.calls if version - call.version <= max_staleness]
        num_dropped += len(episode.calls) - len(fresh)
        if fresh or not episode.calls:
            episodes.append(replace(episode, calls=fresh))
    return replace(group, episodes=episodes), num_dropped
