"""A tokenizer with special tokens, a chat template, and several tokenizations of some words."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fakevllm_server.forest.call_text_comparison import Vocabulary

START, END = 1, 2
SPECIAL = {START: "<|im_start|>", END: "<|im_end|>"}
PIECE = 0x110000
"""Ids from PIECE on are the entries of PIECES. Other ids are characters plus 10."""
PIECES = ("having", "hav", "ing")


def encode(text: str, pieces: Sequence[str] = ("having",)) -> list[int]:
    """Return the ids of a text. Other `pieces` give other ids for the same text."""
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


def prompt_of(*messages: str) -> str:
    """Apply the chat template to messages `role: text`, up to the start of the answer."""
    parts = [message.split(": ", 1) for message in messages]
    turns = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in parts]
    return "".join([*turns, "<|im_start|>assistant\n"])


FULL = Vocabulary(decode, frozenset(SPECIAL), START)
IDS_ONLY = Vocabulary()
