"""Why sessions branch: calls that do not go on where an earlier one ended. Pure.

An active episode is one session, its calls in the order they were made. A passive group's siblings
have one prompt, the next turn of a conversation; what came before it, the proxy tells
(`FinishedGroup.follows`). Where that is not known, a group is not looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fakevllm_server.calls import FinishedGroup
from fakevllm_server.forest.drift import Cause, SessionCall, causes, drift_metrics
from fakevllm_server.forest.history import Vocabulary

MAX_TOKENS = 200_000
"""Of a step's calls that are looked at: a step is told when they all are."""


def branches(
    groups: Sequence[FinishedGroup], vocabulary: Vocabulary | None = None
) -> dict[str, float]:
    """`branch_<cause>` for every cause that occurred, `drift_rate`, and `branch_rate`: the share of
    later calls that do not extend an earlier one. Without a vocabulary whatever needs text is
    `unknown`. `calls_not_compared`: what was beyond MAX_TOKENS, if anything."""
    sessions, turns = _of_episodes(groups), _of_turns(groups)
    found = causes(_within(sessions), vocabulary)
    # The first of each pair was counted with its own group, or was never captured.
    found += causes(_within(turns), vocabulary)[1::2]
    later = [cause for cause in found if cause is not Cause.FIRST]
    branched = sum(cause is not Cause.EXTENDS for cause in later)
    missed = len(sessions) + len(turns) // 2 - len(found)
    return {
        **drift_metrics(found),
        "branch_rate": branched / len(later) if later else 0.0,
        **({"calls_not_compared": float(missed)} if missed else {}),
    }


def _within(calls: Sequence[SessionCall]) -> list[SessionCall]:
    """As many of the first ones as a step has time for: each is compared with those before it."""
    lengths = accumulate(len(call.prompt_ids) + len(call.response_ids) for call in calls)
    return [call for call, upto in zip(calls, lengths, strict=True) if upto <= MAX_TOKENS]


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
