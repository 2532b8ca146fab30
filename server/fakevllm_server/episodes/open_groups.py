"""The captured model calls of passive groups that have not ended yet. A passive group consists of
the answers to one request of an app. This module does no I/O, and gets the current time as an
argument."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.types.calls import RecordedCall
from fakevllm_server.types.drop_reasons import DropReason

MAX_OPEN_GROUPS = 10_000
MAX_OPEN_TOKENS = 20_000_000
"""Maximum number of tokens in all open groups. If there are more tokens, or more groups than
MAX_OPEN_GROUPS, the group whose last call is oldest is dropped."""
MAX_OPEN_S = 3600.0
"""A group is dropped if its last call is more than this number of seconds ago, because its client
has probably disappeared."""


@dataclass(slots=True)
class OpenGroup:
    """The captured model calls of one group that has not ended. A group has the answers to one
    request of an app."""

    calls: defaultdict[int, list[RecordedCall]] = field(
        default_factory=lambda: defaultdict[int, list[RecordedCall]](list)
    )
    """Captured calls of each sibling, by sibling index."""
    last_call: float = 0.0


class OpenGroups:
    """The open groups. An open group has the answers to one request of an app, and the proxy has
    not sent the rewards of these answers yet."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, OpenGroup] = OrderedDict()  # ordered by their last call
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the open groups. The group whose last model call is the oldest
        comes first."""
        return iter(self._groups)

    def __contains__(self, group_id: str) -> bool:
        return group_id in self._groups

    def add(self, sibling: SiblingRef, call: RecordedCall, now: float) -> int:
        """Add a captured call to the group of `sibling`, one of the answers to a request. If the
        group does not exist, create it. Return the index of the call among the calls of this
        sibling."""
        group = self._groups.setdefault(sibling.group_id, OpenGroup())
        calls = group.calls[sibling.index]
        calls.append(call)
        self.num_tokens += call.num_tokens
        group.last_call = now
        self._groups.move_to_end(sibling.group_id)
        return len(calls) - 1

    def with_shared_prompt(self, group_id: str, call: RecordedCall) -> RecordedCall:
        """Return a call that equals `call`. If an earlier call of the group has an equal prompt,
        the returned call uses the earlier call's array of prompt ids. The prompt is then stored,
        encoded and hashed only once."""
        group = self._groups.get(group_id)
        known = [] if group is None else [own[-1] for own in group.calls.values() if own]
        for other in known:
            if other.prompt_ids is call.prompt_ids:
                return call
            if other.prompt_ids == call.prompt_ids:
                return replace(call, prompt_ids=other.prompt_ids)
        return call

    def restore(
        self, group_id: str, calls: Mapping[int, Sequence[RecordedCall]], now: float
    ) -> None:
        """Add a group that was open before a restart. The time of its last call is set to `now`."""
        for index, sibling_calls in calls.items():
            for call in sibling_calls:
                self.add(SiblingRef(group_id, index), call, now)

    def pop(self, group_id: str) -> OpenGroup | None:
        """Remove and return the open group with this id. Return None if no group with this id is
        open."""
        group = self._groups.pop(group_id, None)
        if group is not None:
            self.num_tokens -= sum(call.num_tokens for own in group.calls.values() for call in own)
        return group

    def pop_expired(self, now: float) -> dict[str, str]:
        """Remove each group whose last call is more than MAX_OPEN_S seconds ago. If the groups or
        their tokens are still too many, also remove the groups with the oldest last call.

        Return a dict from the id of each removed group to the reason of its removal.
        """
        expired: dict[str, str] = {}
        while self._groups:
            group_id, oldest = next(iter(self._groups.items()))
            is_full = len(self._groups) > MAX_OPEN_GROUPS or self.num_tokens > MAX_OPEN_TOKENS
            if not is_full and now - oldest.last_call <= MAX_OPEN_S:
                break
            self.pop(group_id)
            expired[group_id] = (
                DropReason.POOL_FULL.value if is_full else DropReason.NEVER_ENDED.value
            )
        return expired
