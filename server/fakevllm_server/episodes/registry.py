"""The registry of claimed episodes: claim, renew, end, abort, expire. Pure; the clock is passed in.

When a claim is given up or expires, the next client gets the same episode. Each claim has an epoch,
which is part of its key and of the uuid that the client knows. Whoever comes late with an older
epoch is refused and changes nothing, also on routes that carry only the uuid.

Clients match the texts of refusals as they stand, so they must not change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.keys import new_episode_key, new_id
from fakevllm_server.episodes.submissions import IdempotencyConflict
from fakevllm_server.types.calls import RecordedCall

MAX_CLAIMED = 2_000
"""Number of episodes that may be claimed at once. This is enough for a thousand clients, and for as
many claims whose clients died or never got the reply, until these claims expire. The calls of all
claimed episodes are held in memory."""
ID_CHARS = 28
"""Length of an episode's id, which is the beginning of the uuid of each of its claims."""
_EPOCH_CHARS = 4
_SHOWN_CHARS = 80


def max_claims(job: TrainJob | None) -> int:
    """Return how many episodes may be claimed at once.

    This is one batch, or as many whole tasks as `max_env_worker` allows.

    >>> max_claims(TrainJob(batch_size=32, num_repeat=4, max_env_worker=50))
    48
    """
    if job is None:
        return MAX_CLAIMED
    workers = min(job.max_env_worker or MAX_CLAIMED, MAX_CLAIMED)
    return min(job.batch_size, max(1, workers // job.num_repeat)) * job.num_repeat


NO_CALL = (
    "No call of this episode was captured, so it trains nothing: let its agent call the base URL "
    "with the key of its claim, and abort an episode that makes no call."
)


class EpisodeRefused(Exception):
    """A refused request for an episode, which changed nothing; with HTTP status and detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Idempotency:
    """The idempotency key of a claim, with which the client may send the same claim again."""

    key: str
    body_hash: bytes
    """Hash of the whole request."""


@dataclass(slots=True)
class Episode:
    """One claimed run of an agent: one key, one reward, any number of calls."""

    episode_id: str
    epoch: int
    key: str
    client_uuid: str
    kind: str
    """train or eval"""
    idle_limit_s: float
    """Seconds without activity after which the claim expires."""
    last_activity: float
    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    in_flight: int = 0
    """Number of calls that are running."""
    owner: str = ""
    """Name of the API key that claimed the episode; "" if the server asks for no key."""
    task_id: str = ""
    """The task, if a throttle policy named it in the claim."""
    idempotency: Idempotency | None = None
    """None if the client does not repeat this claim."""

    @property
    def warning(self) -> str:
        """The warning to send if the episode ends in its present state."""
        return NO_CALL if self.kind == "train" and not self.calls else ""

    @property
    def uuid(self) -> str:
        """The name of this claim that the client uses."""
        return claim_uuid(self.episode_id, self.epoch)


def _idempotency_id(episode: Episode, idempotency: Idempotency) -> tuple[str, str, str]:
    return episode.owner, episode.client_uuid, idempotency.key


def claim_uuid(episode_id: str, epoch: int) -> str:
    """Return 32 hex digits, the form of all ids in the protocol.

    >>> claim_uuid("ab" * 14, 2)
    'abababababababababababababab0002'
    """
    return f"{episode_id}{epoch:0{_EPOCH_CHARS}x}"


class EpisodeRegistry:
    """All claimed episodes, and the open ones that wait for the next claim."""

    def __init__(self) -> None:
        self._claimed: dict[str, Episode] = {}
        """Claimed episodes by id."""
        self._by_key: dict[str, Episode] = {}
        self._by_idempotency: dict[tuple[str, str, str], Episode] = {}
        """Claimed episodes by owner, client and idempotency key."""
        self._num_training = 0
        self._open: OrderedDict[str, int] = OrderedDict()
        """Ids and last epochs of episodes that were given up, oldest first."""

    @property
    def num_claimed(self) -> int:
        return len(self._claimed)

    @property
    def claimed(self) -> list[Episode]:
        return list(self._claimed.values())

    @property
    def num_training(self) -> int:
        """Number of claimed episodes that are not evaluations."""
        return self._num_training

    def can_claim(self, num_slots: int) -> bool:
        return len(self._claimed) < num_slots

    def claim(
        self,
        client_uuid: str,
        kind: str,
        idle_limit_s: float,
        now: float,
        owner: str = "",
        idempotency: Idempotency | None = None,
    ) -> Episode:
        """Claim the episode that was given up the longest time ago, or a new one."""
        known = self._open.popitem(last=False) if self._open else None
        episode_id, epoch = known or (new_id()[:ID_CHARS], 0)
        epoch += 1
        key = new_episode_key(epoch)
        episode = Episode(
            episode_id,
            epoch,
            key,
            client_uuid,
            kind,
            idle_limit_s,
            now,
            owner=owner,
            idempotency=idempotency,
        )
        self.restore(episode)
        return episode

    def find_claim(self, client_uuid: str, owner: str, idempotency: Idempotency) -> Episode | None:
        """Return what the same request has claimed, if that claim is still valid.

        The reply to the first request may have been lost. Raises IdempotencyConflict.
        """
        episode = self._by_idempotency.get((owner, client_uuid, idempotency.key))
        if episode is not None and episode.idempotency != idempotency:
            raise IdempotencyConflict
        return episode

    def restore(self, episode: Episode) -> None:
        """Register a claimed episode, which may be from before a restart."""
        self._claimed[episode.episode_id] = self._by_key[episode.key] = episode
        if episode.idempotency is not None:
            self._by_idempotency[_idempotency_id(episode, episode.idempotency)] = episode
        self._num_training += episode.kind == "train"

    def reopen(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Register open episodes from before a restart, as pairs of id and last epoch."""
        self._open.update(episodes)

    def find(self, uuid: str) -> Episode | None:
        """Return the claim with this uuid, but not a later claim of the same episode."""
        episode = self._claimed.get(uuid[:ID_CHARS])
        return episode if episode is not None and episode.uuid == uuid else None

    def find_by_key(self, key: str | None) -> Episode | None:
        return self._by_key.get(key) if key is not None else None

    def check_owner(self, uuid: str, caller: str) -> None:
        """Raise EpisodeRefused if another API key has claimed the episode.

        If the server asks for no keys, all callers are the same.
        """
        episode = self.find(uuid)
        if episode is not None and caller and episode.owner not in ("", caller):
            raise EpisodeRefused(404, _foreign(uuid, episode.owner, caller))

    def renew(self, episode: Episode, now: float) -> None:
        """Record that the client is alive."""
        episode.last_activity = now

    def call_begins(self, episode: Episode, now: float) -> None:
        episode.in_flight += 1
        self.renew(episode, now)

    def call_ends(self, episode: Episode, now: float) -> None:
        """Record the end of a call. A call that outlived its episode changes nothing."""
        episode.in_flight -= 1
        self.renew(episode, now)

    def find_owned(self, uuid: str, client_uuid: str) -> Episode:
        """Return the claim with this uuid. Raises EpisodeRefused if it is not this client's."""
        episode = self.find(uuid)
        if episode is None:
            raise EpisodeRefused(400, self._missing_reason(uuid))
        if episode.client_uuid != client_uuid:
            raise EpisodeRefused(404, _foreign(uuid, episode.client_uuid, client_uuid))
        return episode

    def end(self, uuid: str, client_uuid: str) -> Episode:
        """Remove the episode and return it. Raises EpisodeRefused."""
        episode = self.find_owned(uuid, client_uuid)
        self._remove(episode)
        return episode

    def abort(self, uuid: str, client_uuid: str) -> Episode | None:
        """Reopen the episode and return it; ignore an unknown one and one of another client."""
        episode = self.find(uuid)
        if episode is None or episode.client_uuid != client_uuid:
            return None
        self._reopen(episode)
        return episode

    def sweep(self, now: float) -> list[Episode]:
        """Reopen the episodes that were idle beyond their limit, and return them.

        A call in flight is activity. A sweep visits all episodes, so do not sweep for each request.
        """
        idle = [
            episode
            for episode in self._claimed.values()
            if not episode.in_flight and now - episode.last_activity > episode.idle_limit_s
        ]
        for episode in idle:
            self._reopen(episode)
        return idle

    def give_up(self) -> list[Episode]:
        """Reopen all claimed episodes and return them, because the engine was stopped."""
        claimed = list(self._claimed.values())
        for episode in claimed:
            self._reopen(episode)
        return claimed

    def _missing_reason(self, uuid: str) -> str:
        episode_id, uuid = uuid[:ID_CHARS], uuid[:_SHOWN_CHARS]
        if episode_id in self._open or episode_id in self._claimed:  # an earlier claim of it
            return (
                f"Episode {uuid} is not in claimed status, maybe you take **too long** to submit "
                "the workflow output, try increase `discard_episode_timeout` when `begin_episode`."
            )
        return f"Episode {uuid} not found."

    def _reopen(self, episode: Episode) -> None:
        self._remove(episode)
        self._open[episode.episode_id] = episode.epoch

    def _remove(self, episode: Episode) -> None:
        del self._claimed[episode.episode_id]
        del self._by_key[episode.key]
        if episode.idempotency is not None:
            del self._by_idempotency[_idempotency_id(episode, episode.idempotency)]
        self._num_training -= episode.kind == "train"


def _foreign(uuid: str, claimed_by: str, asked_by: str) -> str:
    return f"Episode {uuid} is claimed by different client: {claimed_by}, but got {asked_by}."
