"""The registry of episodes that clients have claimed. It makes, renews, ends, aborts and expires
claims. This module does no I/O, and gets the current time as an argument.

A claim reserves an episode for one client. When a claim is aborted or expires, the next client gets
the same episode. The claims of an episode are numbered 1, 2, 3 and so on. The number of a claim is
called its epoch. Each claim has a key and a uuid of its own, and both contain the epoch. Each
request names the claim by its key or its uuid. Therefore the registry recognizes a late request of
a client whose claim has ended, and refuses the request.

The texts of refusals must not change, because clients compare them with fixed strings.
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
"""Maximum number of claimed episodes. The number is enough for a thousand claims that clients use
and a thousand lost claims. A claim is lost if its client died or did not get the reply, and is
freed only when it expires. The limit exists because the calls of all claimed episodes are kept in
memory."""
ID_CHARS = 28
"""Length of an episode's id, which is the beginning of the uuid of each of its claims."""
_EPOCH_CHARS = 4
_SHOWN_CHARS = 80


def max_claims(job: TrainJob | None) -> int:
    """Return the maximum number of episodes that may be claimed at a time.

    The result is normally the number of episodes in a batch: `batch_size` tasks with `num_repeat`
    episodes each. If the job's `max_env_worker` is smaller, the result is `max_env_worker`, rounded
    down to a multiple of `num_repeat`, but at least `num_repeat`. With `async_steps`, the result
    also includes the episodes of the batches that are collected ahead. Without a job, the result
    is MAX_CLAIMED.

    >>> max_claims(TrainJob(batch_size=32, num_repeat=4, max_env_worker=50))
    48
    """
    if job is None:
        return MAX_CLAIMED
    workers = min(job.max_env_worker or MAX_CLAIMED, MAX_CLAIMED)
    num_tasks = job.batch_size * (1 + job.async_steps)
    return min(num_tasks, max(1, workers // job.num_repeat)) * job.num_repeat


NO_CALL = (
    "No call of this episode was captured, so it trains nothing: let its agent call the base URL "
    "with the key of its claim, and abort an episode that makes no call."
)
"""Warning for a client that ends a training episode without calls."""


class EpisodeRefused(Exception):
    """Error for a refused request about an episode, with the HTTP status and the text of the
    refusal. The request changed nothing."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Idempotency:
    """The idempotency key of a request that claims an episode. With the key, the client can repeat
    the request without claiming a second episode."""

    key: str
    body_hash: bytes
    """Hash of the whole request."""


@dataclass(slots=True)
class Episode:
    """One claimed run of an agent. The run has one API key, any number of model calls, and one
    reward."""

    episode_id: str
    epoch: int
    key: str
    client_uuid: str
    kind: str
    """Kind of the episode: `train` or `eval`."""
    idle_limit_s: float
    """Seconds without activity after which the claim expires."""
    last_activity: float
    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    in_flight: int = 0
    """Number of calls that are running."""
    owner: str = ""
    """Owner id of the API key that claimed the episode: the key's name or, without a name, its
    fingerprint. "" if the server needs no key."""
    task_id: str = ""
    """Task id from the claim's throttle policy; "" without one."""
    idempotency: Idempotency | None = None
    """Idempotency key of the claim request; None if the request had none."""

    @property
    def warning(self) -> str:
        """Warning that the client gets if it ends the episode now. It is "" if there is no reason
        for a warning."""
        return NO_CALL if self.kind == "train" and not self.calls else ""

    @property
    def uuid(self) -> str:
        """Uuid by which the client addresses this claim of the episode."""
        return claim_uuid(self.episode_id, self.epoch)


def _idempotency_id(episode: Episode, idempotency: Idempotency) -> tuple[str, str, str]:
    return episode.owner, episode.client_uuid, idempotency.key


def claim_uuid(episode_id: str, epoch: int) -> str:
    """Return the uuid of a claim. The uuid has 32 hex digits. It consists of the episode's id and
    the epoch, which is the number of the claim.

    >>> claim_uuid("ab" * 14, 2)
    'abababababababababababababab0002'
    """
    return f"{episode_id}{epoch:0{_EPOCH_CHARS}x}"


class EpisodeRegistry:
    """All claimed episodes, and all open episodes. An open episode was claimed before, and waits
    for the next claim."""

    def __init__(self) -> None:
        self._claimed: dict[str, Episode] = {}
        """Claimed episodes by id."""
        self._by_key: dict[str, Episode] = {}
        self._by_idempotency: dict[tuple[str, str, str], Episode] = {}
        """Claimed episodes by owner, client and idempotency key."""
        self._num_training = 0
        self._open: OrderedDict[str, int] = OrderedDict()
        """Maps the id of each open episode to its last epoch. The episode that became open first is
        first."""

    @property
    def num_claimed(self) -> int:
        return len(self._claimed)

    @property
    def claimed(self) -> list[Episode]:
        return list(self._claimed.values())

    @property
    def num_training(self) -> int:
        """Number of claimed episodes that may be trained on. Evaluation episodes are not
        counted."""
        return self._num_training

    def can_claim(self, num_slots: int) -> bool:
        """Return True if fewer than `num_slots` episodes are claimed."""
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
        """Claim an episode for a client, and return the episode. Take the episode that has waited
        longest for its next claim. If no episode waits, take a new episode."""
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
        """Return the episode that an identical earlier request has claimed. Return None if there is
        no such claim.

        A client repeats a request if the reply was lost. Raises IdempotencyConflict if a different
        request with this idempotency key has claimed an episode.
        """
        episode = self._by_idempotency.get((owner, client_uuid, idempotency.key))
        if episode is not None and episode.idempotency != idempotency:
            raise IdempotencyConflict
        return episode

    def restore(self, episode: Episode) -> None:
        """Add `episode` to the claimed episodes of the registry. The episode may have been claimed
        before a restart of the server."""
        self._claimed[episode.episode_id] = self._by_key[episode.key] = episode
        if episode.idempotency is not None:
            self._by_idempotency[_idempotency_id(episode, episode.idempotency)] = episode
        self._num_training += episode.kind == "train"

    def reopen(self, episodes: Sequence[tuple[str, int]]) -> None:
        """Add to the registry the episodes that were open before a restart of the server. An open
        episode was claimed before, and waits for its next claim.

        `episodes` has a pair (episode id, number of the last claim) for each episode.
        """
        self._open.update(episodes)

    def find(self, uuid: str) -> Episode | None:
        """Return the claimed episode with this uuid. Return None if the uuid is unknown, or if the
        uuid belongs to an earlier claim of the episode."""
        episode = self._claimed.get(uuid[:ID_CHARS])
        return episode if episode is not None and episode.uuid == uuid else None

    def find_by_key(self, key: str | None) -> Episode | None:
        return self._by_key.get(key) if key is not None else None

    def check_owner(self, uuid: str, caller: str) -> None:
        """Raise EpisodeRefused if the episode was claimed with an API key other than the caller's.

        `caller` is the owner id of the caller's API key. If the server requires no keys, `caller`
        is empty, and no episode is refused.
        """
        episode = self.find(uuid)
        if episode is not None and caller and episode.owner not in ("", caller):
            raise EpisodeRefused(404, _foreign(uuid, episode.owner, caller))

    def renew(self, episode: Episode, now: float) -> None:
        """Record activity on a claimed episode, so that the time until the claim expires starts
        again."""
        episode.last_activity = now

    def call_begins(self, episode: Episode, now: float) -> None:
        episode.in_flight += 1
        self.renew(episode, now)

    def call_ends(self, episode: Episode, now: float) -> None:
        """Record that a model call of an episode has ended. This method may also be called after
        the end of the episode itself."""
        episode.in_flight -= 1
        self.renew(episode, now)

    def find_owned(self, uuid: str, client_uuid: str) -> Episode:
        """Return the claimed episode with this uuid. Raises EpisodeRefused if no claimed episode
        has this uuid, or if another client has claimed it."""
        episode = self.find(uuid)
        if episode is None:
            raise EpisodeRefused(400, self._missing_reason(uuid))
        if episode.client_uuid != client_uuid:
            raise EpisodeRefused(404, _foreign(uuid, episode.client_uuid, client_uuid))
        return episode

    def end(self, uuid: str, client_uuid: str) -> Episode:
        """Remove the claimed episode with this uuid, and return the episode. Raises EpisodeRefused
        if this client has not claimed the episode."""
        episode = self.find_owned(uuid, client_uuid)
        self._remove(episode)
        return episode

    def abort(self, uuid: str, client_uuid: str) -> Episode | None:
        """Give the episode up and return it. The next client can then claim it. If the episode is
        unknown, or if another client has claimed it, change nothing and return None."""
        episode = self.find(uuid)
        if episode is None or episode.client_uuid != client_uuid:
            return None
        self._reopen(episode)
        return episode

    def sweep(self, now: float) -> list[Episode]:
        """Reopen the episodes whose claims were idle for longer than their limit. Other clients can
        then claim these episodes. Return the episodes.

        An episode with a running call is not idle. The method visits all claimed episodes, so it is
        too slow to be called for each request.
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
        """Reopen all claimed episodes for other clients, and return them. Call this method when the
        engine has been stopped."""
        claimed = list(self._claimed.values())
        for episode in claimed:
            self._reopen(episode)
        return claimed

    def _missing_reason(self, uuid: str) -> str:
        """Return the text with which a request is refused if no claimed episode has the request's
        uuid."""
        episode_id, uuid = uuid[:ID_CHARS], uuid[:_SHOWN_CHARS]
        if episode_id in self._open or episode_id in self._claimed:  # the uuid is an earlier claim
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


def _foreign(uuid: str, claimed_by: str, caller: str) -> str:
    """Return the text with which a request is refused if another client has claimed the episode."""
    return f"Episode {uuid} is claimed by different client: {claimed_by}, but got {caller}."
