"""Hypothesis strategies of JSON values."""

from __future__ import annotations

from hypothesis import strategies as st

TEXTS = st.text(st.sampled_from('[]{}"\\/é\ud83d😀a\n\0'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=30,
)
