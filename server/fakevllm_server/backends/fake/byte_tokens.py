"""The token ids of the fake engine: bytes of UTF-8 text, and three special tokens."""

from __future__ import annotations

from collections.abc import Sequence

NUM_BYTES = 256
"""Token ids below this number are the bytes of UTF-8 text."""
EOS, TURN, TOOL_CALL = 256, 257, 258
"""Ids of the special tokens that end a sequence, begin a message, and begin a message's tool calls.
"""
SPECIAL = {EOS: b"<|end|>", TURN: b"<|turn|>"}
"""Texts of special tokens."""


def decode(ids: Sequence[int], *, skip_special_tokens: bool) -> str:
    """Return the text of token ids."""
    special = {} if skip_special_tokens else SPECIAL
    return b"".join(special.get(id, b"") if id >= NUM_BYTES else bytes([id]) for id in ids).decode(
        errors="replace"
    )
