"""Check one request: its response directly from vLLM, and through proxy and server."""

from __future__ import annotations

from tests.differential.comparison import differences
from tests.differential.corpus import corpus
from tests.differential.engines import DIRECT, Setups
from tests.differential.known_differences import known, missing, unexplained


def check_request(setups: Setups, name: str, setup: str) -> None:
    """Assert that the responses differ exactly as the table of known differences says."""
    request = corpus()[name]
    direct, ours = (setups.send(one, request, corpus()) for one in (DIRECT, setup))
    lines = differences(direct, ours, is_free=request.is_free)
    entries = known(name, setup)
    assert not unexplained(lines, entries), "\n".join(lines)
    assert not missing(lines, entries), "\n".join(["A known difference is missing:", *lines])
