"""One request, asked of vLLM directly and in one of our ways."""

from __future__ import annotations

from tests.differential.comparison import differences
from tests.differential.corpus import corpus
from tests.differential.engines import DIRECT, Ways
from tests.differential.known import known, missing, unexplained


def check(asked: Ways, name: str, way: str) -> None:
    """Asserts that nothing differs but what is meant to, and that this does."""
    request = corpus()[name]
    direct, ours = (asked.ask(one, request, corpus()) for one in (DIRECT, way))
    found = differences(direct, ours, is_free=request.is_free)
    meant = known(name, way)
    assert not unexplained(found, meant), "\n".join(found)
    assert not missing(found, meant), "\n".join(["no longer so:", *found])
