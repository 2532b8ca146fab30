"""Text to ids and back, with special tokens, two spellings of some words, and a template."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fakevllm_server.forest.history import Vocabulary

START, END = 1, 2
SPECIAL = {START: "<|im_start|>", END: "<|im_end|>"}
PIECE = 0x110000
"""Ids from here on are the pieces of PIECES; all others are characters, moved by 10."""
PIECES = ("having", "hav", "ing")


def encode(text: str, pieces: Sequence[str] = ("having",)) -> list[int]:
    """Longest pieces first; another choice of them is another spelling of the same text."""
    parts = [*map(re.escape, SPECIAL.values()), *pieces, "."]
    return [_id(part) for part in re.findall("|".join(parts), text, re.DOTALL)]


def _id(part: str) -> int:
    if part in PIECES:
        return PIECE + PIECES.index(part)
    return next((token for token, text in SPECIAL.items() if text == part), ord(part[0]) + 10)


def decode(ids: Sequence[int]) -> str:
    return "".join(
        PIECES[token - PIECE] if token >= PIECE else SPECIAL.get(token) or chr(token - 10)
        for token in ids
    )


def asked(*messages: str) -> str:
    """`role: text` each, and the start of the answer."""
    parts = [message.split(": ", 1) for message in messages]
    turns = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in parts]
    return "".join([*turns, "<|im_start|>assistant\n"])


FULL = Vocabulary(decode, frozenset(SPECIAL), START)
IDS_ONLY = Vocabulary()
