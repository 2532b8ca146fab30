"""Decide whether a client may claim an episode, and record which clients take part in the current
batch.

A claim reserves an episode for one client. A mix is a named kind of tasks, such as "math". The
quota of a mix is its share of each batch. Claims are also refused while an admin has paused claims.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fakevllm_adapters.protocol.batch_status import ThrottlePolicy
from fakevllm_adapters.protocol.swarm import ClaimEpisodeRequest
from fakevllm_server.episodes.active_clients import ActiveClients
from fakevllm_server.episodes.episode_registry import Episode
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.episodes.states import EngineLifecycle

MAX_REMEMBERED = 20_000
"""Maximum number of claims whose client is remembered. Only claims with a throttle policy, which
may set a quota, are remembered."""
PAUSED = "Claims are paused: an admin holds new episodes back."


class Participation:
    """Decides by pauses and quotas whether clients may claim episodes. A claim reserves an episode
    for one client. The object also records which clients take part in the current batch."""

    def __init__(self, pool: Pool, engine: EngineLifecycle) -> None:
        self.clients: ActiveClients = pool.clients
        self.is_paused = False
        """Whether an admin has paused claims. The pause also ends when the engine is stopped."""
        self._batch_size = pool.batch_size
        self._quotas = pool.quotas
        self._engine = engine
        self._throttled: OrderedDict[str, str] = OrderedDict()
        """Client of each claim that had a throttle policy, by the claim's uuid."""

    def refusal(self, request: ClaimEpisodeRequest, now: float) -> str | None:
        """Return the reason why an episode cannot be claimed now. Return None if it can be claimed.

        Quotas apply only to training episodes. Therefore a claim of an evaluation episode is
        refused only during a pause. A refused request still counts as activity of its client and of
        its mix (a named kind of tasks).
        """
        self.clients.touch(request.client_uuid, now)
        refusal = self._quota_refusal(request, now)
        return PAUSED if self.is_paused else refusal

    def _quota_refusal(self, request: ClaimEpisodeRequest, now: float) -> str | None:
        policy = request.throttle_policy
        share = None if policy is None else policy.share_of(self._batch_size)
        if policy is None or share is None or request.episode_type != "train":
            return None
        name = _mix_name(policy, request.client_uuid)
        rolling_s = self._engine.seconds_rolling(now)
        if self._quotas.may_begin(name, share, policy.ratio, policy.current_task_id, rolling_s):
            return None
        return f"{name} has its share of {share:.0%} under way, and the others are behind."

    def claimed(self, episode: Episode, policy: ThrottlePolicy | None, now: float) -> None:
        """Count a newly claimed episode towards the quota of its mix (a named kind of tasks, such
        as "math")."""
        if policy is None:
            return
        episode.task_id = policy.current_task_id
        if episode.kind != "train":
            return
        self._throttled[episode.uuid] = episode.client_uuid
        if len(self._throttled) > MAX_REMEMBERED:
            self._throttled.popitem(last=False)
        if policy.share_of(self._batch_size) is not None:
            name = _mix_name(policy, episode.client_uuid)
            self._quotas.claimed(name, episode.task_id, self._engine.seconds_rolling(now))

    def ended(self, episode: Episode, task_id: str | None, is_active: bool, now: float) -> None:
        """Record that a training episode ended or was aborted. Evaluation episodes are ignored.

        `task_id` is the task for which the client submitted the episode, or None if the episode
        will not be trained. If `is_active` is true, the client now takes part in the current batch.
        """
        if episode.kind != "train":
            return
        rolling_s = self._engine.seconds_rolling(now)
        if task_id is None:
            self._quotas.abandoned(episode.task_id, rolling_s)
        else:
            self._quotas.ended(episode.task_id, task_id, rolling_s)
        if is_active:
            self.clients.add(episode.client_uuid, now)

    def expired(self, episodes: Sequence[Episode], now: float) -> None:
        """Record that the claims of `episodes` have expired. Also remove the mixes (named kinds of
        tasks) without recent activity. Clients without recent requests are marked as silent.
        Training steps that start when the clients agree do not wait for silent clients."""
        rolling_s = self._engine.seconds_rolling(now)
        for episode in episodes:
            if episode.kind == "train":
                self._quotas.abandoned(episode.task_id, rolling_s)
        self._quotas.sweep(rolling_s)
        self.clients.sweep(now)

    def client_of(self, uuid: str) -> str | None:
        """Return the client that claimed the episode with this uuid. Only claims of training
        episodes with a throttle policy are remembered. Such a policy limits a kind of tasks to a
        share of each batch. For all other claims, return None."""
        return self._throttled.get(uuid)


def _mix_name(policy: ThrottlePolicy, client_uuid: str) -> str:
    return policy.mix or client_uuid
