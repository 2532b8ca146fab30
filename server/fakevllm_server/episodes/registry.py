"""Episodes of active clients: claim, touch, end, abort, sweep. Pure; the clock is passed in.

A claim that is given up or runs out leaves its episode to the next who asks. Each claim has an
epoch, which is part of its key and of the uuid its client knows it by: whoever comes late with an
older one is told so and changes nothing, also on routes that carry no more than the uuid. The texts
of refusals are matched by clients as they stand.
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
"""Episodes that may be claimed at once: those of a thousand clients, and as many whose clients died
or never heard of their claim, until these run out. Their calls are held in memory."""
ID_CHARS = 28
"""Of an episode's id, with which the names of its claims begin."""
_EPOCH_CHARS = 4
_SHOWN_CHARS = 80


def slots(job: TrainJob | None) -> int:
    """How many may be claimed at once: a batch, or as many whole tasks as `max_env_worker` allows.

    >>> slots(TrainJob(batch_size=32, num_repeat=4, max_env_worker=50))
    48
    """
    if job is None:
        return MAX_CLAIMED
    workers = min(job.max_env_worker or MAX_CLAIMED, MAX_CLAIMED)
    return min(job.batch_size, max(1, workers // job.num_repeat)) * job.num_repeat


NO_CALL = (
    "No call of it was captured, so nothing of it trains: let its agent call the base URL and the "
    "key of its claim, and abort an episode that comes to no call."
)


class EpisodeRefused(Exception):
    """An end that changes nothing: HTTP status and detail."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Idempotency:
    """With which a claim is asked for again."""

    key: str
    body_hash: bytes
    """Of the whole request."""


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
    last_activity: float
    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    in_flight: int = 0
    owner: str = ""
    """Whose key claimed it; "": no key was asked for."""
    task_id: str = ""
    """Where a throttle policy named it at the claim."""
    idempotency: Idempotency | None = None
    """None: its client does not ask for this claim again."""

    @property
    def warning(self) -> str:
        """Where it is ended as it is."""
        return NO_CALL if self.kind == "train" and not self.calls else ""

    @property
    def uuid(self) -> str:
        """What its client calls this claim of it."""
        return claim_uuid(self.episode_id, self.epoch)


def _name_of(episode: Episode, idempotency: Idempotency) -> tuple[str, str, str]:
    return episode.owner, episode.client_uuid, idempotency.key


def claim_uuid(episode_id: str, epoch: int) -> str:
    """32 hex digits, as an id of the protocol's.

    >>> claim_uuid("ab" * 14, 2)
    'abababababababababababababab0002'
    """
    return f"{episode_id}{epoch:0{_EPOCH_CHARS}x}"


class EpisodeRegistry:
    def __init__(self) -> None:
        self._claimed: dict[str, Episode] = {}
        """By id."""
        self._by_key: dict[str, Episode] = {}
        self._by_idempotency: dict[tuple[str, str, str], Episode] = {}
        """By owner, client and key."""
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
        """The episode that has been given up longest ago, or a new one."""
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
        """What the same request has claimed, as long as it stands: its answer may have been lost.
        Raises IdempotencyConflict."""
        episode = self._by_idempotency.get((owner, client_uuid, idempotency.key))
        if episode is not None and episode.idempotency != idempotency:
            raise IdempotencyConflict
        return episode

    def restore(self, episode: Episode) -> None:
        """One that was claimed in an earlier life, or just now."""
        self._claimed[episode.episode_id] = self._by_key[episode.key] = episode
        if episode.idempotency is not None:
            self._by_idempotency[_name_of(episode, episode.idempotency)] = episode
        self._num_training += episode.kind == "train"

    def reopen(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Ids and last epochs of those an earlier life left unclaimed."""
        self._open.update(episodes)

    def find(self, uuid: str) -> Episode | None:
        """The claim of that name; not a later one of the same episode."""
        episode = self._claimed.get(uuid[:ID_CHARS])
        return episode if episode is not None and episode.uuid == uuid else None

    def of_key(self, key: str | None) -> Episode | None:
        return self._by_key.get(key) if key is not None else None

    def check_owner(self, uuid: str, caller: str) -> None:
        """Raises EpisodeRefused where somebody else's key claimed it. Without keys nobody is
        somebody else."""
        episode = self.find(uuid)
        if episode is not None and caller and episode.owner not in ("", caller):
            raise EpisodeRefused(404, _foreign(uuid, episode.owner, caller))

    def renew(self, episode: Episode, now: float) -> None:
        """Its client is still there."""
        episode.last_activity = now

    def call_begins(self, episode: Episode, now: float) -> None:
        episode.in_flight += 1
        self.renew(episode, now)

    def call_ends(self, episode: Episode, now: float) -> None:
        """A call that outlived its episode changes nothing."""
        episode.in_flight -= 1
        self.renew(episode, now)

    def owned(self, uuid: str, client_uuid: str) -> Episode:
        """The claim of that name, where it is this client's. Raises EpisodeRefused."""
        episode = self.find(uuid)
        if episode is None:
            raise EpisodeRefused(400, self._why_gone(uuid))
        if episode.client_uuid != client_uuid:
            raise EpisodeRefused(404, _foreign(uuid, episode.client_uuid, client_uuid))
        return episode

    def end(self, uuid: str, client_uuid: str) -> Episode:
        """The episode, now closed. Raises EpisodeRefused."""
        episode = self.owned(uuid, client_uuid)
        self._forget(episode)
        return episode

    def abort(self, uuid: str, client_uuid: str) -> Episode | None:
        """The episode, which is open again. Unknown and foreign ones are left alone."""
        episode = self.find(uuid)
        if episode is None or episode.client_uuid != client_uuid:
            return None
        self._lapse(episode)
        return episode

    def sweep(self, now: float) -> list[Episode]:
        """Those idle beyond their limit, which are open again. A call in flight is activity. Looks
        at all: not for every request."""
        idle = [
            episode
            for episode in self._claimed.values()
            if not episode.in_flight and now - episode.last_activity > episode.idle_limit_s
        ]
        for episode in idle:
            self._lapse(episode)
        return idle

    def give_up(self) -> list[Episode]:
        """All of them: the engine has been stopped."""
        claimed = list(self._claimed.values())
        for episode in claimed:
            self._lapse(episode)
        return claimed

    def _why_gone(self, uuid: str) -> str:
        episode_id, uuid = uuid[:ID_CHARS], uuid[:_SHOWN_CHARS]
        if episode_id in self._open or episode_id in self._claimed:  # an earlier claim of it
            return (
                f"Episode {uuid} is not in claimed status, maybe you take **too long** to submit "
                "the workflow output, try increase `discard_episode_timeout` when `begin_episode`."
            )
        return f"Episode {uuid} not found."

    def _lapse(self, episode: Episode) -> None:
        self._forget(episode)
        self._open[episode.episode_id] = episode.epoch

    def _forget(self, episode: Episode) -> None:
        del self._claimed[episode.episode_id]
        del self._by_key[episode.key]
        if episode.idempotency is not None:
            del self._by_idempotency[_name_of(episode, episode.idempotency)]
        self._num_training -= episode.kind == "train"


def _foreign(uuid: str, claimed_by: str, asked_by: str) -> str:
    return f"Episode {uuid} is claimed by different client: {claimed_by}, but got {asked_by}."
