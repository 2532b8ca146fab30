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
    """
    parts = [str(replica["state"])]
    if replica.get("cause") is not None and replica["state"] != "serving":
        parts.append(str(replica["cause"]))
    if replica.get("restarts"):
        parts.append(f"restarts: {replica['restarts']}")
    if replica.get("prefix_hit_share") is not None:
        parts.append(f"prefix cache {replica['prefix_hit_share']:.0%}")
    return ", ".join(parts)


def replica_line(replica: Mapping[str, Any]) -> str:
    """Return the whole status of a replica in one line, without its name.

    >>> replica_line({"state": "serving", "version": 3, "running": 1})
    'version 3, 1 running, serving'
    """
    version, running = replica.get("version", 0), replica.get("running", 0)
    return f"version {version}, {running} running, {replica_state(replica)}"
