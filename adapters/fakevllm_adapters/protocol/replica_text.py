"""Texts about a rollout replica, for status commands and pages. The module imports no pydantic, so
that status commands start fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def replica_state(replica: Mapping[str, Any]) -> str:
    """Return a replica's state with its restarts, its prefix cache, and the cause of a restart in
    progress. `replica` has the fields of a ReplicaStatus.

    >>> replica_state({"state": "starting", "cause": "it was killed", "restarts": 2})
    'starting, it was killed, restarts: 2'
    >>> replica_state({"state": "draining", "cause": "it was killed", "restarts": 2})
    'draining, restarts: 2'
    """
    parts = [str(replica["state"])]
    if replica.get("cause") is not None and replica["state"] == "starting":
        parts.append(str(replica["cause"]))
    if replica.get("restarts"):
        parts.append(f"restarts: {replica['restarts']}")
    if replica.get("prefix_hit_share") is not None:
        parts.append(f"prefix cache {replica['prefix_hit_share']:.0%}")
    return ", ".join(parts)


def replica_line(replica: Mapping[str, Any]) -> str:
    """Return the whole status of a replica in one line, without its name.

    >>> replica_line({"state": "serving", "version": 3, "running": 5, "waiting": 2})
    'version 3, 5 running, 2 waiting, serving'
    """
    parts = [f"version {replica.get('version', 0)}", f"{replica.get('running', 0)} running"]
    if replica.get("waiting") is not None:
        parts.append(f"{replica['waiting']} waiting")
    return ", ".join([*parts, replica_state(replica)])
