"""What clients of a run know for certain: what they did, and what was acknowledged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pydantic import BaseModel

from fakevllm_server.episodes.registry import Idempotency
from fakevllm_server.types.calls import RecordedCall
from tests.swarm_server.journal.lives import Life

Calls = list[RecordedCall]
Ask = Callable[[Life], Awaitable[BaseModel]]


@dataclass(slots=True)
class Claim:
    episode_id: str
    uuid: str
    key: str
    kind: str
    is_short: bool
    """Whether it runs out within the hour."""
    asked_with: Idempotency
    renewed_at_h: int = 0
    calls: Calls = field(default_factory=list[RecordedCall])


@dataclass(frozen=True, slots=True)
class Ended:
    """An episode."""

    claim: Claim
    task_id: str
    reward: float


@dataclass(frozen=True, slots=True)
class Acknowledged:
    ask: Ask
    """The same again."""
    ask_other: Ask
    """With other words under the same name."""
    reply: BaseModel


@dataclass(slots=True)
class Account:
    claims: dict[str, Claim] = field(default_factory=dict[str, Claim])
    """By their uuid."""
    lapsed: list[Claim] = field(default_factory=list[Claim])
    open_episodes: set[str] = field(default_factory=set[str])
    ended: dict[str, Ended] = field(default_factory=dict[str, Ended])
    left: set[frozenset[str]] = field(default_factory=set[frozenset[str]])
    """The claims of each task that was compared as far as it was there, or may have been."""
    open_groups: dict[str, defaultdict[int, Calls]] = field(
        default_factory=dict[str, defaultdict[int, Calls]]
    )
    ended_groups: dict[str, dict[int, Calls]] = field(default_factory=dict[str, dict[int, Calls]])
    """And samples; those that were pooled, with all that was scored of them."""
    aborted_groups: set[str] = field(default_factory=set[str])
    acknowledged: list[Acknowledged] = field(default_factory=list[Acknowledged])

    @property
    def num_created(self) -> int:
        episodes = {claim.episode_id for claim in [*self.claims.values(), *self.lapsed]}
        return len(episodes | {one.claim.episode_id for one in self.ended.values()})

    def claimed(self, claim: Claim) -> None:
        self.claims[claim.uuid] = claim
        self.open_episodes.discard(claim.episode_id)

    def lapse(self, claim: Claim) -> None:
        del self.claims[claim.uuid]
        self.lapsed.append(claim)
        self.open_episodes.add(claim.episode_id)

    def end(self, ended: Ended) -> None:
        del self.claims[ended.claim.uuid]
        self.ended[ended.claim.uuid] = ended

    def ran_out(self, at_h: int) -> list[Claim]:
        return [one for one in self.claims.values() if one.is_short and at_h > one.renewed_at_h]

    def next_life(self) -> None:
        """All clients are given their whole time again."""
        for claim in self.claims.values():
            claim.renewed_at_h = 0

    def capture(self, name: str, index: int, call: RecordedCall) -> None:
        if name not in self.ended_groups and name not in self.aborted_groups:
            self.open_groups.setdefault(name, defaultdict(list))[index].append(call)

    def end_group(self, name: str, num: int) -> None:
        calls = self.open_groups.pop(name)
        self.ended_groups[name] = {index: calls.get(index, []) for index in range(num)}

    def abort_group(self, name: str) -> None:
        self.open_groups.pop(name, None)
        if name not in self.ended_groups:
            self.aborted_groups.add(name)

    def calls_of(self, owner: str) -> Calls:
        """Of a claim or sibling."""
        if owner in self.ended:
            return self.ended[owner].claim.calls
        name, _, index = owner.rpartition("/")
        return self.ended_groups[name][int(index)]
