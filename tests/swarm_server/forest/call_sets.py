"""Random sets of calls, with so few different tokens that the calls often share prefixes."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from fakevllm_server.forest import CallTokens
from fakevllm_server.types.token_masks import packed

tokens = st.integers(0, 2)
SETS = [(0, 1, 2), (0, 1, 7, 10), (2, 3), (1, 2, 9), (1,)]
"""Allowed sets in a vocabulary of eleven ids."""


def packed_set(*ids: int) -> bytes:
    return packed(sum(1 << id for id in ids).to_bytes(2, "little"))


@st.composite
def allowed_sets(draw: st.DrawFn, ids: list[int]) -> list[bytes | None] | None:
    """Draw allowed sets as a grammar or top-p would leave them: no sets for some calls, and a set
    at some tokens for others."""
    if draw(st.sampled_from([False, False, True])):
        sets_with = {id: [packed_set(*ids) for ids in SETS if id in ids] for id in set(ids)}
        return [draw(st.sampled_from([None, *sets_with[id]])) for id in ids]
    return None


@st.composite
def calls(draw: st.DrawFn) -> CallTokens:
    """Draw a call: a prompt of at least one token, a response that may be empty, and any spans."""
    prompt = draw(st.lists(tokens, min_size=1, max_size=6))
    response = draw(st.lists(tokens, max_size=6))
    root = draw(st.sampled_from(["base", "base", "adapter"]))
    temperature = draw(st.sampled_from([1.0, 1.0, 8.0]))
    ids = [*prompt, *response]
    sets = draw(allowed_sets(ids))
    if draw(st.booleans()):
        return replace(CallTokens.of(prompt, response, root, temperature), allowed_sets=sets)
    positions = draw(st.sets(st.integers(1, 11)))
    trained = [(at, at + 1) for at in sorted(positions) if at < len(ids)]
    return CallTokens(ids, trained, root, temperature, sets)


@st.composite
def call_sets(draw: st.DrawFn, max_calls: int = 5) -> list[CallTokens]:
    """Draw up to twice `max_calls` calls, with duplicates, prefixes of other calls, and calls that
    continue where others end."""
    drawn = draw(st.lists(calls(), max_size=max_calls))
    for source in list(drawn):
        relation = draw(st.sampled_from(["none", "twin", "prefix", "next turn"]))
        if relation == "twin":
            drawn.append(source)
        elif relation == "prefix":
            kept = draw(st.integers(0, len(source.ids)))
            drawn.append(CallTokens(source.ids[:kept], [], source.root, source.temperature))
        elif relation == "next turn":
            observed = draw(st.lists(tokens, max_size=3))
            reply = draw(st.lists(tokens, max_size=3))
            drawn.append(CallTokens.of([*source.ids, *observed], reply, source.root))
    return draw(st.permutations(drawn))


GOLDEN = [
    CallTokens.of([1, 2, 3], [4, 5]),
    CallTokens.of([1, 2, 3], [4, 6]),
    CallTokens.of([1, 2, 3], [7]),
    CallTokens.of([1, 2, 3, 4, 5, 9], [8]),
]
"""Two siblings that share their first sampled token, a third sibling, and the next turn of the
first sibling."""
