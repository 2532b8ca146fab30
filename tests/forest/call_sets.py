"""Random sets of calls, small enough to meet each other often."""

from __future__ import annotations

from hypothesis import strategies as st

from fakevllm_server.forest import CallTokens

tokens = st.integers(0, 2)


@st.composite
def calls(draw: st.DrawFn) -> CallTokens:
    """Prompts of one token and more, empty responses, spans that leave tokens out."""
    prompt = draw(st.lists(tokens, min_size=1, max_size=6))
    response = draw(st.lists(tokens, max_size=6))
    root = draw(st.sampled_from(["base", "base", "adapter"]))
    temperature = draw(st.sampled_from([1.0, 1.0, 8.0]))
    if draw(st.booleans()):
        return CallTokens.of(prompt, response, root, temperature)
    ids = [*prompt, *response]
    drawn = draw(st.sets(st.integers(1, 11)))
    marked = [at for at in sorted(drawn) if at < len(ids)]
    return CallTokens(ids, [(at, at + 1) for at in marked], root, temperature)


@st.composite
def call_sets(draw: st.DrawFn, max_calls: int = 5) -> list[CallTokens]:
    """With duplicates, prefixes of each other, and calls that go on where others end: up to twice
    `max_calls`."""
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
"""Two siblings that share their first sampled token, a third, and the first one's next turn."""
