"""Why sessions branch: calls of active episodes that do not go on where an earlier one ended. Pure.

An episode is one session, its calls in the order they were made. Siblings of passive traffic are
one call each; what session and turn theirs is, nobody tells the server, so they are not looked at.
Whoever knows (the proxy does) can give `FinishedGroup` those facts and join its groups here.
"""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm_server.calls import FinishedGroup
from fakevllm_server.forest.drift import Cause, SessionCall, causes, drift_metrics
from fakevllm_server.forest.history import Vocabulary


def branches(
    groups: Sequence[FinishedGroup], vocabulary: Vocabulary | None = None
) -> dict[str, float]:
    """`branch_<cause>` for every cause that occurred, `drift_rate`, and `branch_rate`: the share of
    later calls that do not extend an earlier one. Without a vocabulary whatever needs text is
    `unknown`."""
    found = causes(_session_calls(groups), vocabulary)
    later = [cause for cause in found if cause is not Cause.FIRST]
    branched = sum(cause is not Cause.EXTENDS for cause in later)
    return {
        **drift_metrics(found),
        "branch_rate": branched / len(later) if later else 0.0,
    }


def _session_calls(groups: Sequence[FinishedGroup]) -> list[SessionCall]:
    return [
        SessionCall((group.group_id, episode.index), number, call.prompt_ids, call.response_ids)
        for group in groups
        for episode in group.episodes
        if len(episode.calls) > 1
        for number, call in enumerate(episode.calls)
    ]
