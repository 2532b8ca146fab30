"""Why sessions branch: calls that do not go on where an earlier one ended. Pure.

An active episode is one session, its calls in the order they were made. A passive group's siblings
have one prompt, the next turn of a conversation; what came before it, the proxy tells
(`FinishedGroup.follows`). Where that is not known, a group is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm_server.calls import FinishedGroup
from fakevllm_server.forest.drift import Cause, SessionCall, causes, drift_metrics
from fakevllm_server.forest.history import Vocabulary

MAX_TOKENS = 1_000_000
"""Of a step's calls that are read as text: a step is told when they all are."""


def branches(
    groups: Sequence[FinishedGroup], vocabulary: Vocabulary | None = None
) -> dict[str, float]:
    """`branch_<cause>` for every cause that occurred, `drift_rate`, and `branch_rate`: the share of
    later calls that do not extend an earlier one; no rate where none is later. Without a vocabulary
    whatever needs text is `unknown`; what is beyond MAX_TOKENS is `not_read`."""
    found = causes(_of_episodes(groups), vocabulary, MAX_TOKENS)
    # The first of each pair was counted with its own group, or was never captured.
    found += causes(_of_turns(groups), vocabulary, MAX_TOKENS)[1::2]
    later = [cause for cause in found if cause is not Cause.FIRST]
    branched = sum(cause is not Cause.EXTENDS for cause in later)
    rate = {"branch_rate": branched / len(later)} if later else {}
    return {**drift_metrics(found), **rate}


def _of_episodes(groups: Sequence[FinishedGroup]) -> list[SessionCall]:
    return [
        SessionCall((group.group_id, episode.index), number, call.prompt_ids, call.response_ids)
        for group in groups
        for episode in group.episodes
        if len(episode.calls) > 1
        for number, call in enumerate(episode.calls)
    ]


def _of_turns(groups: Sequence[FinishedGroup]) -> list[SessionCall]:
    """Pairs: the served call before, and the group's own prompt."""
    pairs: list[SessionCall] = []
    for group in groups:
        own = [call for episode in group.episodes for call in episode.calls]
        if group.follows is not None and own:
            pairs += [
                SessionCall(group.group_id, number, call.prompt_ids, call.response_ids)
                for number, call in enumerate((group.follows, own[0]))
            ]
    return pairs
