"""One observation per session from the rewards of its turns."""

from __future__ import annotations

from collections.abc import Iterable


def session_means(turns: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each session's turns, in the order in which the sessions began.

    `turns` are pairs (session id, value) in the order of time. Turns of one session are about one
    user and one subject, so they are not independent. A confidence sequence over single turns would
    be too narrow. A session is therefore one observation, and a long session counts as much as a
    short one.

    >>> session_means([("a", 1.0), ("b", 0.0), ("a", 0.0)])
    {'a': 0.5, 'b': 0.0}
    """
    sums: dict[str, tuple[float, int]] = {}
    for session_id, value in turns:
        total, num = sums.get(session_id, (0.0, 0))
        sums[session_id] = (total + value, num + 1)
    return {session_id: total / num for session_id, (total, num) in sums.items()}
