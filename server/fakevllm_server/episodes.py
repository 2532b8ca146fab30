"""Episodes of active clients: claim, touch, end, abort, sweep. Pure; the clock is passed in.

The texts of refusals are matched by clients as they stand.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from fakevllm_adapters.keys import new_episode_key, new_id
from fakevllm_server.calls import RecordedCall

MAX_CLAIMED = 128
"""Episodes that may be claimed at once; AgentJet's default of max_env_worker."""
MAX_REMEMBERED = 10_000
"""Ended episodes whose end may be repeated."""


class EpisodeRefused(Exception):
    """An end that changes nothing: HTTP status and detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(slots=True)
class Episode:
    """One claimed run of an agent: one key, one reward, any number of calls."""

    uuid: str
    key: str
    client_uuid: str
    kind: str
    """train or eval"""
    idle_limit_s: float
    last_activity: float
    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    in_flight: int = 0


class Episodes:
    def __init__(self) -> None:
        self._claimed: dict[str, Episode] = {}
        self._by_key: dict[str, Episode] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    @property
    def num_claimed(self) -> int:
        return len(self._claimed)

    @property
    def num_training(self) -> int:
        return sum(episode.kind == "train" for episode in self._claimed.values())

    def can_claim(self) -> bool:
        return len(self._claimed) < MAX_CLAIMED

    def claim(self, client_uuid: str, kind: str, idle_limit_s: float, now: float) -> Episode:
        episode = Episode(new_id(), new_episode_key(), client_uuid, kind, idle_limit_s, now)
        self._claimed[episode.uuid] = self._by_key[episode.key] = episode
        return episode

    def find(self, uuid: str) -> Episode | None:
        return self._claimed.get(uuid)

    def of_key(self, key: str | None) -> Episode | None:
        return self._by_key.get(key) if key is not None else None

    def call_begins(self, episode: Episode, now: float) -> None:
        episode.in_flight += 1
        episode.last_activity = now

    def call_ends(self, episode: Episode, now: float) -> None:
        """A call that outlived its episode changes nothing."""
        episode.in_flight -= 1
        episode.last_activity = now

    def end(self, uuid: str, client_uuid: str) -> Episode | None:
        """The episode, now closed; None where this client has already ended it. Raises
        EpisodeRefused."""
        if self._ended.get(uuid) == client_uuid:
            return None
        episode = self._claimed.get(uuid)
        if episode is None:
            raise EpisodeRefused(400, f"Episode {uuid} not found.")
        if episode.client_uuid != client_uuid:
            owner = episode.client_uuid
            detail = (
                f"Episode {uuid} is claimed by different client: {owner}, but got {client_uuid}."
            )
            raise EpisodeRefused(404, detail)
        self._forget(episode)
        self._ended[uuid] = client_uuid
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        return episode

    def abort(self, uuid: str, client_uuid: str) -> None:
        """Unknown and foreign episodes are left alone."""
        episode = self._claimed.get(uuid)
        if episode is not None and episode.client_uuid == client_uuid:
            self._forget(episode)

    def sweep(self, now: float) -> list[str]:
        """Discards episodes idle beyond their limit. A call in flight is activity."""
        idle = [
            episode
            for episode in self._claimed.values()
            if not episode.in_flight and now - episode.last_activity > episode.idle_limit_s
        ]
        for episode in idle:
            self._forget(episode)
        return [episode.uuid for episode in idle]

    def clear(self) -> None:
        self._claimed.clear()
        self._by_key.clear()

    def _forget(self, episode: Episode) -> None:
        del self._claimed[episode.uuid]
        del self._by_key[episode.key]
