"""The requests that the clients of a run have sent, and the replies that they have received."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from pydantic import BaseModel

from fakevllm_server.episodes.episode_registry import Idempotency
from fakevllm_server.types.calls import RecordedCall
from tests.swarm_server.journal.server_process import ServerProcess

Calls = list[RecordedCall]
Request = Callable[[ServerProcess], Awaitable[BaseModel]]
"""Sends a request to a server and returns its reply."""


@dataclass(slots=True)
class Claim:
    episode_id: str
    uuid: str
    key: str
    kind: str
    is_short: bool
    """Whether the claim expires within an hour."""
    idempotency: Idempotency
    renewed_at_h: int = 0
    calls: Calls = field(default_factory=list[RecordedCall])


@dataclass(frozen=True, slots=True)
class EndedEpisode:
    claim: Claim
    task_id: str
    reward: float


@dataclass(frozen=True, slots=True)
class AcknowledgedRequest:
    request: Request
    """Sends the same request again."""
    conflicting_request: Request
    """Sends another body with the same idempotency key."""
    reply: BaseModel


@dataclass(slots=True)
class ClientRecords:
    """The episodes and groups of all clients, with the states that the server must report."""

    claims: dict[str, Claim] = field(default_factory=dict[str, Claim])
    """Valid claims by uuid."""
    expired: list[Claim] = field(default_factory=list[Claim])
    open_episodes: set[str] = field(default_factory=set[str])
    ended: dict[str, EndedEpisode] = field(default_factory=dict[str, EndedEpisode])
    partial_tasks: set[frozenset[str]] = field(default_factory=set[frozenset[str]])
    """The claims of each task that was or may have been completed with missing episodes."""
    open_groups: dict[str, defaultdict[int, Calls]] = field(
        default_factory=dict[str, defaultdict[int, Calls]]
    )
    ended_groups: dict[str, dict[int, Calls]] = field(default_factory=dict[str, dict[int, Calls]])
    """Pooled groups, feedback samples and edits, with the calls of their scored siblings."""
    aborted_groups: set[str] = field(default_factory=set[str])
    acknowledged: list[AcknowledgedRequest] = field(default_factory=list[AcknowledgedRequest])

    @property
    def num_created(self) -> int:
        episodes = {claim.episode_id for claim in [*self.claims.values(), *self.expired]}
        return len(episodes | {episode.claim.episode_id for episode in self.ended.values()})

    def add_claim(self, claim: Claim) -> None:
        self.claims[claim.uuid] = claim
        self.open_episodes.discard(claim.episode_id)

    def expire(self, claim: Claim) -> None:
        del self.claims[claim.uuid]
        self.expired.append(claim)
        self.open_episodes.add(claim.episode_id)

    def end_episode(self, episode: EndedEpisode) -> None:
        del self.claims[episode.claim.uuid]
        self.ended[episode.claim.uuid] = episode

    def claims_expired_at(self, at_h: int) -> list[Claim]:
        claims = self.claims.values()
        return [claim for claim in claims if claim.is_short and at_h > claim.renewed_at_h]

    def restart(self) -> None:
        """Start the idle limits of all claims again, as a restarted server does."""
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
        """Return the calls of an ended claim or a sibling."""
        if owner in self.ended:
            return self.ended[owner].claim.calls
        name, _, index = owner.rpartition("/")
        return self.ended_groups[name][int(index)]
