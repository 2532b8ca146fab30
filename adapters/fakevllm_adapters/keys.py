"""API keys and ids: what they look like and what they say.

A key is opaque to its bearer. Two kinds carry a meaning for us: `sk-task-<id>` names the task a
replayed request
belongs to, and an episode key opens one claimed episode.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

TASK_KEY_PREFIX = "sk-task-"
EPISODE_KEY_PREFIX = "sk-ajet-"


def bearer(authorization: str | None) -> str | None:
    """The key in an Authorization header, or None."""
    if authorization is None:
        return None
    scheme, _, key = authorization.partition(" ")
    return key.strip() or None if scheme.lower() == "bearer" else None


def bearer_header(key: str | None) -> dict[str, str]:
    """The request headers that show a key; none without one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def task_key(task_id: str) -> str:
    return TASK_KEY_PREFIX + task_id


def task_id_of(key: str | None) -> str | None:
    """The task a key names, or None for any other key."""
    if key is None or not key.startswith(TASK_KEY_PREFIX):
        return None
    return key.removeprefix(TASK_KEY_PREFIX) or None


def new_id() -> str:
    """32 hex digits, random."""
    return secrets.token_hex(16)


def new_episode_key() -> str:
    return EPISODE_KEY_PREFIX + secrets.token_urlsafe(24)


def keys_in(text: str) -> list[str]:
    """The keys of a key file: one a line, `#` begins a comment line."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def fingerprint(key: str) -> str:
    """Eight hex digits that tell keys apart in logs and the ledger without giving them away."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]


class KeyRing:
    """The keys a process accepts, held as hashes. An empty ring accepts everybody."""

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def accepts(self, key: str | None) -> bool:
        if not self._hashes:
            return True
        given = hashlib.sha256((key or "").encode()).digest()
        # every hash is compared, so that the time taken does not tell which one matched
        return any([hmac.compare_digest(given, known) for known in self._hashes])
