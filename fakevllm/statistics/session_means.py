"""Compute one observation per session: the mean of the rewards of the session's turns."""

from __future__ import annotations

from collections.abc import Iterable


def session_means(turns: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the mean of each session's turns, in the order in which the sessions began.

    `turns` are pairs (session id, value) in the order of time. Turns of one session are not
    independent, because they are about one user and one subject. A confidence sequence over single
    turns would be too narrow. Therefore a session is one observation, and a long session has the
    same weight as a short session.

    >>> session_means([("a", 1.0), ("b", 0.0), ("a", 0.0)])
    {'a': 0.5, 'b': 0.0}
    """
    sums: dict[str, tuple[float, int]] = {}
    for session_id, value in turns:
        total, num = sums.get(session_id, (0.0, 0))
        sums[session_id] = (total + value, num + 1)
    return {session_id: total / num for session_id, (total, num) in sums.items()}
