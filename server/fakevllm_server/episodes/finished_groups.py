"""Groups that wait to be trained, in the order they came; bounded by number and by tokens. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from fakevllm_adapters.job.model import MAX_BATCH_SIZE, TrainJob
from fakevllm_server.algorithms.staleness import keep_fresh
from fakevllm_server.episodes.group_policy import why_not_pooled
from fakevllm_server.types.calls import FinishedGroup

MAX_FINISHED_GROUPS = MAX_BATCH_SIZE
MAX_TOKENS = 20_000_000
"""Of all of them; beyond either the group of the oldest weights goes: it is the next to be too old
for any step."""


class FinishedGroups:
    def __init__(self) -> None:
        self._groups: OrderedDict[str, FinishedGroup] = OrderedDict()
        self._versions: dict[str, int] = {}
        """Of each: a group's own is a look at all its calls."""
        self.num_tokens = self.num_episodes = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[FinishedGroup]:
        """A copy: they may be changed meanwhile."""
        return iter(list(self._groups.values()))

    def add(self, group: FinishedGroup) -> list[str]:
        """Ids of those it leaves no room for; its own may be one."""
        self.put(group)
        left_out: list[str] = []
        while len(self._groups) > MAX_FINISHED_GROUPS or self.num_tokens > MAX_TOKENS:
            # Of several, the one that came first.
            left_out.append(min(self._groups, key=self._versions.__getitem__))
            self.remove(left_out[-1])
        return left_out

    def put(self, group: FinishedGroup) -> None:
        """A new one, or one in the place it has already."""
        before = self._groups.get(group.group_id)
        self.num_tokens += group.num_tokens - (before.num_tokens if before is not None else 0)
        self.num_episodes += len(group.episodes) - (len(before.episodes) if before else 0)
        self._groups[group.group_id] = group
        self._versions[group.group_id] = group.version

    def newest(self, num: int) -> list[str]:
        """Ids, in the order they came."""
        return list(self._groups)[-num:]

    def remove(self, group_id: str) -> FinishedGroup:
        group = self._groups.pop(group_id)
        del self._versions[group_id]
        self.num_tokens -= group.num_tokens
        self.num_episodes -= len(group.episodes)
        return group

    def drop_stale(self, version: int, job: TrainJob) -> tuple[list[str], int]:
        """Takes out the calls that are too many versions back. Ids of the groups of which too
        little is left, which go too, and how many calls were taken."""
        left_out: list[str] = []
        num_calls = 0
        for group in self:
            fresh, num_stale = keep_fresh(group, version, job.max_staleness)
            num_calls += num_stale
            if num_stale and why_not_pooled(fresh, job) is not None:
                left_out.append(self.remove(group.group_id).group_id)
            elif num_stale:
                self.put(fresh)
        return left_out, num_calls

    def clear(self) -> list[str]:
        """Their ids."""
        ids = list(self._groups)
        for group_id in ids:
            self.remove(group_id)
        return ids


# Ids of groups that may not come again, each with the reason. Pure.

MAX_REMEMBERED = 20_000
"""Of this life; older ones, and those of earlier lives, are looked up."""


class EndedGroupIds:
    def __init__(self, why_ended: Callable[[str], str | None]) -> None:
        """`why_ended` knows those that are not remembered."""
        self._why_ended = why_ended
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def refusal_of(self, group_id: str) -> str | None:
        """Why the id may not come again; None where it may."""
        return self._reasons.get(group_id) or self._why_ended(group_id)

    def is_new(self, group_id: str) -> bool:
        return self.refusal_of(group_id) is None

    def remember(self, group_id: str, reason: str | None = None) -> None:
        self._reasons[group_id] = reason or "already_ended"
        if len(self._reasons) > MAX_REMEMBERED:
            self._reasons.popitem(last=False)
