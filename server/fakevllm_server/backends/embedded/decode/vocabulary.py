"""Check the token ids of a request against the vocabulary, and convert bad words to token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from fakevllm_adapters.protocol.errors import bad_request
from fakevllm_server.types.sampling import Sampling


def check_ids(sampling: Sampling, vocab_size: int) -> None:
    """Check that the vocabulary contains the ids in `logit_bias` and `allowed_token_ids`, and that
    `allowed_token_ids` is not empty. Raises WireError (400) with the error message of vLLM."""
    outside = _outside(sampling.logit_bias, vocab_size)
    if outside:
        raise bad_request(
            f"token_id(s) {outside} in logit_bias contain out-of-vocab token ids. Vocabulary "
            f"size: {vocab_size}",
            "logit_bias",
            outside,
        )
    if sampling.allowed_ids is None:
        return
    if not sampling.allowed_ids:
        raise bad_request("allowed_token_ids is not None and empty!", "allowed_token_ids", [])
    outside = _outside(sampling.allowed_ids, vocab_size)
    if outside:
        raise bad_request(
            "allowed_token_ids contains out-of-vocab token id!", "allowed_token_ids", outside
        )


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Return the token id sequences of bad words. The sequence of a word at the start of a text is
    always included. The sequence of the word after a space is also included if the two sequences
    have the same length and different first ids. This is vLLM's rule. Empty sequences are left
    out."""
    spellings: list[list[int]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        spellings.append(plain)
        if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            spellings.append(spaced)
    return [ids for ids in spellings if ids]


def longest_token_bytes(tokenizer: Any) -> int:
    """Return an upper bound for the number of UTF-8 bytes in the text of a single token.

    The bound is the length of the longest vocabulary entry in UTF-8 bytes. The bound also holds for
    byte-level vocabularies. Their entries have one character for each byte of text, and a character
    has at least one byte in UTF-8.
    """
    return max(len(token.encode(errors="replace")) for token in tokenizer.get_vocab())


def _outside(ids: Collection[int], vocab_size: int) -> list[int]:
    return [id for id in ids if not 0 <= id < vocab_size]
