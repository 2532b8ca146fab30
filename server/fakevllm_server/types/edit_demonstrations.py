"""Users' edits of answers as groups of demonstrations.

The group of an edit has one episode for each demonstration, in the order of `KINDS_OF_EDITS`. Each
episode has one call, which holds the token ids. No engine has sampled these calls, so they have no
log-probabilities. Their version is LOGGED_VERSION, so they never become stale.
"""

from __future__ import annotations

from collections.abc import Sequence

from fakevllm_adapters.protocol.packed_numbers import unpack_ids
from fakevllm_adapters.protocol.swarm import AddDemonstrationRequest, DemonstrationIds, SiblingRef
from fakevllm_server.types.calls import (
    LOGGED_VERSION,
    FinishedGroup,
    RecordedCall,
    ScoredEpisode,
    VersionSpan,
)
from fakevllm_server.types.demonstrations import Demonstration, DemonstrationKind

KINDS_OF_EDITS: dict[str, tuple[DemonstrationKind, ...]] = {
    "sft": ("plain",),
    "dpo": ("chosen", "rejected"),
}
"""The kinds of the demonstrations of an edit, by the demonstration loss that trains them."""


def parse_demonstrations(request: AddDemonstrationRequest) -> tuple[str, list[RecordedCall]]:
    """Return the demonstration loss of a request, and its demonstrations as calls.

    Raises ValueError if the demonstrations are not those of an edit, or if ids are missing.
    """
    kinds = tuple(one.kind for one in request.demonstrations)
    loss = next((name for name, own in KINDS_OF_EDITS.items() if own == kinds), None)
    if loss is None:
        raise ValueError("their kinds must be `plain` alone, or `chosen` and then `rejected`")
    return loss, [_call(one) for one in request.demonstrations]


def _call(ids: DemonstrationIds) -> RecordedCall:
    prompt_ids, response_ids = unpack_ids(ids.prompt_ids), unpack_ids(ids.response_ids)
    if not prompt_ids or not response_ids or min(*prompt_ids, *response_ids) < 0:
        raise ValueError(f"the prompt or the response of `{ids.kind}` has no ids, or negative ids")
    spans = [VersionSpan(LOGGED_VERSION, 0, len(response_ids))]
    return RecordedCall(prompt_ids, response_ids, None, spans, 1.0, None, None)


def edit_episodes(group_id: str, calls: Sequence[RecordedCall]) -> list[ScoredEpisode]:
    """Return the episodes of an edit's group. `calls` are the demonstrations as calls."""
    return [
        ScoredEpisode(index, None, (call,), SiblingRef(group_id, index).episode_id)
        for index, call in enumerate(calls)
    ]


def edit_demonstrations(group: FinishedGroup) -> list[Demonstration]:
    """Return the demonstrations of a group that was made from an edit."""
    assert group.demonstrates is not None, "only the group of an edit has demonstrations"
    kinds = KINDS_OF_EDITS[group.demonstrates]
    pair = group.group_id if len(kinds) > 1 else None
    return [
        Demonstration(group.group_id, call.prompt_ids, call.response_ids, kind, pair)
        for kind, episode in zip(kinds, group.episodes, strict=True)
        for call in episode.calls
    ]
