"""Clients and mixes of one run of the engine: who takes part in its batches, and what may begin."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fakevllm_adapters.protocol.pool import ThrottlePolicy
from fakevllm_adapters.protocol.swarm import ClaimEpisodeRequest
from fakevllm_server.episodes.clients import ActiveClients
from fakevllm_server.episodes.pool import Pool
from fakevllm_server.episodes.registry import Episode
from fakevllm_server.episodes.states import EngineLifecycle

MAX_REMEMBERED = 20_000
"""Claims whose client is told of later."""
PAUSED = "Claims are paused: an admin holds new episodes back."


class Participation:
    def __init__(self, pool: Pool, engine: EngineLifecycle) -> None:
        self.clients: ActiveClients = pool.clients
        self.is_paused = False
        """No new episode begins. It ends with this run of the engine."""
        self._batch_size = pool.batch_size
        self._mixes = pool.mixes
        self._engine = engine
        self._throttled: OrderedDict[str, str] = OrderedDict()

    def why_not(self, request: ClaimEpisodeRequest, now: float) -> str | None:
        """Why an episode of this task has to wait; None where it may begin. Evaluations may, but
        for a pause."""
        self.clients.seen(request.client_uuid, now)
        waits = self._why_not_by_share(request, now)  # who asks is heard, also in a pause
        return PAUSED if self.is_paused else waits

    def _why_not_by_share(self, request: ClaimEpisodeRequest, now: float) -> str | None:
        policy = request.throttle_policy
        share = None if policy is None else policy.share_of(self._batch_size)
        if policy is None or share is None or request.episode_type != "train":
            return None
        name = _mix_of(policy, request.client_uuid)
        rolled_s = self._engine.seconds_rolling(now)
        if self._mixes.may_begin(name, share, policy.ratio, policy.current_task_id, rolled_s):
            return None
        return f"{name} has its share of {share:.0%} under way, and the others are behind."

    def claimed(self, episode: Episode, policy: ThrottlePolicy | None, now: float) -> None:
        if policy is None:
            return
        episode.task_id = policy.current_task_id
        if episode.kind != "train":
            return
        self._throttled[episode.uuid] = episode.client_uuid
        if len(self._throttled) > MAX_REMEMBERED:
            self._throttled.popitem(last=False)
        if policy.share_of(self._batch_size) is not None:
            name = _mix_of(policy, episode.client_uuid)
            self._mixes.claimed(name, episode.task_id, self._engine.seconds_rolling(now))

    def over(self, episode: Episode, task_id: str | None, is_active: bool, now: float) -> None:
        """`task_id`: what waits to be trained of it; None: nothing does. Its client has a say in
        the step, unless the episode was an evaluation or the client wants none."""
        if episode.kind != "train":
            return
        rolled_s = self._engine.seconds_rolling(now)
        if task_id is None:
            self._mixes.gave_up(episode.task_id, rolled_s)
        else:
            self._mixes.ended(episode.task_id, task_id, rolled_s)
        if is_active:
            self.clients.entered(episode.client_uuid, now)

    def lapsed(self, episodes: Sequence[Episode], now: float) -> None:
        rolled_s = self._engine.seconds_rolling(now)
        for episode in episodes:
            if episode.kind == "train":
                self._mixes.gave_up(episode.task_id, rolled_s)
        self._mixes.sweep(rolled_s)
        self.clients.sweep(now)

    def client_of(self, uuid: str) -> str | None:
        """Who claimed it with a throttle policy."""
        return self._throttled.get(uuid)


def _mix_of(policy: ThrottlePolicy, client_uuid: str) -> str:
    return policy.mix or client_uuid
