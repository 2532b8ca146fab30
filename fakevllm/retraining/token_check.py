"""Check that the tokens in a ledger are those of a model's tokenizer. This module does no I/O.

An answer of the ledger has its text and its token ids. The model's tokenizer must give the ids the
same text. Only plain answers are compared, because a tool call is parsed from its text.
"""

from __future__ import annotations

from dataclasses import dataclass

from fakevllm.retraining.group_reader import TrainableGroup
from fakevllm_adapters.protocol.packed_numbers import unpack_ids

NUM_CHECKED = 8
"""Number of answers that are compared."""
NUM_READ = 100
"""Maximum number of groups that are read to find these answers."""


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """An answer that is plain text, with its token ids."""

    text: str
    token_ids: list[int]

    def is_text_of(self, decoded: str) -> bool:
        """Return True if `decoded`, the text of the token ids, contains the answer. It may have
        special tokens and white space around the answer.

        >>> PlainAnswer("It is 4.", [7, 8]).is_text_of(" It is 4.</s>")
        True
        """
        return self.text.strip() in decoded


def plain_answer(group: TrainableGroup) -> PlainAnswer | None:
    """Return the first plain answer of a group, or None if there is none."""
    for sibling in group.record.siblings:
        calls = group.calls[sibling.index] if sibling.index < len(group.calls) else []
        is_plain = sibling.tool_calls_json is None and (sibling.text or "").strip()
        if is_plain and len(calls) == 1:
            return PlainAnswer(sibling.text or "", list(unpack_ids(calls[0].response_ids)))
    return None


def are_same_tokens(num_equal: int, num_checked: int) -> bool:
    """Return True if so many of the checked answers had the same text that the tokenizers must be
    equal. A few answers may differ, because a parser of the server may have changed their text.

    >>> are_same_tokens(7, 8), are_same_tokens(1, 8), are_same_tokens(0, 0)
    (True, False, True)
    """
    return 2 * num_equal >= num_checked
