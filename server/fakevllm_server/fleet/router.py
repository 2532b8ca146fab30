"""Decides which replica answers a call. The class is pure: the states of the replicas and the
numbers of their running calls are arguments.

Calls that share a prompt go to one replica, so that the replica computes the prompt once. Calls of
one group also go to one replica because their answers are compared, and therefore should be sampled
with the same weights.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

MAX_SESSIONS = 50_000
"""Number of sessions whose replica is remembered. A session that is forgotten counts as new."""
MAX_GROUPS = 10_000
"""Number of groups whose replica is remembered. The calls of a group begin within seconds."""


class ReplicaState(StrEnum):
    """The state of one replica of a fleet."""

    SERVING = "serving"
    """The replica answers calls."""
    DRAINING = "draining"
    """New weights wait for the replica's running calls. The replica gets only further calls of
    groups that it has begun."""
    LOADING = "loading"
    """The replica loads new weights."""
    SUSPECT = "suspect"
    """A call or a health check of the replica has failed. The next health checks decide."""
    STARTING = "starting"
    """The replica is being started, or waits for its next start."""


_BEGUN_GROUPS = (ReplicaState.SERVING, ReplicaState.DRAINING)
"""States in which a replica gets further calls of a group that it has begun."""
_LAST_RESORTS = (ReplicaState.DRAINING, ReplicaState.LOADING, ReplicaState.SUSPECT)
"""States in which a replica gets new calls only if no replica serves, in the order of preference.
Without these, a call would fail although a replica answers it a moment later."""


@dataclass(frozen=True, slots=True)
class CallAffinity:
    """The session, the group and the policy of a call. Each is None if the call has none."""

    session: str | None = None
    """Key of the conversation or the episode to which the call belongs."""
    group: str | None = None
    """Id of the group to which the sampled siblings belong."""
    policy: str | None = None
    """Name of the policy that the call requests. Only a replica that holds it can answer."""


NO_AFFINITY = CallAffinity()


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """The facts about one replica from which the router decides."""

    state: ReplicaState
    num_running: int = 0
    """Number of calls that the replica answers now."""
    policies: frozenset[str] = frozenset()
    """Names of the policies that the replica holds."""


class Router:
    """Chooses the replica for each call, and remembers the replicas of sessions and groups."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, max_groups: int = MAX_GROUPS) -> None:
        self._sessions = _Homes(max_sessions)
        self._groups = _Homes(max_groups)

    def choose(
        self,
        call: CallAffinity,
        replicas: Mapping[str, ReplicaView],
        failed: str | None = None,
    ) -> str | None:
        """Return the name of the replica that answers a call. Return None if no replica can.

        `replicas` are the fleet's replicas by name. `failed` is the replica on which an earlier
        attempt of this call failed. It is chosen again only if there is no other replica.

        The first rule that applies decides:

        1. The replica of the call's group, if it serves or drains.
        2. The replica of the call's session, if it serves.
        3. The replica that serves and has the fewest running calls. The rendezvous hash of the
           session or the group breaks ties. So a router that has forgotten the session often
           chooses the same replica again.
        4. A replica in one of the states _LAST_RESORTS.
        """
        usable = self._usable(call, replicas, failed)
        home = (
            _in_state(self._groups.get(call.group), usable, *_BEGUN_GROUPS)
            or _in_state(self._sessions.get(call.session), usable, ReplicaState.SERVING)
            or _least_loaded(call.session or call.group or "", usable)
        )
        if home is not None:
            self._groups.put(call.group, home)
            if not self._will_return(call.session, replicas, failed):
                self._sessions.put(call.session, home)
        return home

    def _will_return(
        self, session: str | None, replicas: Mapping[str, ReplicaView], failed: str | None
    ) -> bool:
        """Return True if the session's replica is only busy for a moment, so that later calls of
        the session should go to it again. Otherwise the replica that takes new weights last would
        lose all sessions to the others."""
        home = self._sessions.get(session)
        return home is not None and home != failed and _is_passing(replicas.get(home))

    def _usable(
        self, call: CallAffinity, replicas: Mapping[str, ReplicaView], failed: str | None
    ) -> Mapping[str, ReplicaView]:
        """Return the replicas that run and may answer a call, by name."""
        running = {
            name: view for name, view in replicas.items() if view.state is not ReplicaState.STARTING
        }
        others = {name: view for name, view in running.items() if name != failed} or running
        # If no replica holds the policy, any replica sends vLLM's error for an unknown model.
        return {
            name: view for name, view in others.items() if call.policy in (None, *view.policies)
        } or others


def _in_state(
    name: str | None, replicas: Mapping[str, ReplicaView], *states: ReplicaState
) -> str | None:
    """Return `name` if it names a replica in one of the states. Return None otherwise."""
    if name is None or name not in replicas:
        return None
    return name if replicas[name].state in states else None


def _is_passing(replica: ReplicaView | None) -> bool:
    return replica is not None and replica.state in _LAST_RESORTS


def _least_loaded(key: str, replicas: Mapping[str, ReplicaView]) -> str | None:
    """Return the serving replica with the fewest running calls, or a last resort. Return None if
    there are no replicas."""
    for state in (ReplicaState.SERVING, *_LAST_RESORTS):
        candidates = {name: view for name, view in replicas.items() if view.state is state}
        if candidates:
            return min(
                candidates, key=lambda name: (candidates[name].num_running, _distance(key, name))
            )
    return None


def _distance(key: str, replica: str) -> bytes:
    """Return the rendezvous hash of a key and a replica. For each key, the replica with the lowest
    hash comes first. If a replica is added or removed, only its own keys change their replica."""
    return hashlib.blake2b(f"{replica}\0{key}".encode(errors="replace"), digest_size=8).digest()


class _Homes:
    """The replicas of the keys that were used last, up to a maximum number of keys."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def get(self, key: str | None) -> str | None:
        return None if key is None else self._replicas.get(key)

    def put(self, key: str | None, replica: str) -> None:
        if key is None:
            return
        self._replicas[key] = replica
        self._replicas.move_to_end(key)
        if len(self._replicas) > self._max_keys:
            self._replicas.popitem(last=False)
