"""Check that the tokens in a ledger are those of a model's tokenizer. This module does no I/O.

An answer in the ledger has its text and its token ids. The model's tokenizer must decode the ids to
the same text. Only answers without tool calls are compared. For an answer with tool calls, the
ledger has the parsed calls instead of the sampled text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fakevllm.retraining.group_reader import TrainableGroup
from fakevllm_adapters.protocol.packed_numbers import unpack_ids

NUM_CHECKED = 8
"""Number of answers of each run that are compared."""
NUM_READ = 100
"""Maximum number of groups of each run that are read to find these answers."""


@dataclass(frozen=True, slots=True)
class PlainAnswer:
    """The text of an answer without tool calls, and the answer's token ids."""

    text: str
    token_ids: list[int]

    def is_text_of(self, decoded: str) -> bool:
        """Return True if `decoded`, the text of the token ids, contains the answer's text.
        `decoded` may have special tokens and white space around the answer.

        >>> PlainAnswer("It is 4.", [7, 8]).is_text_of(" It is 4.</s>")
        True
        """
        return self.text.strip() in decoded


def by_run(
    group_ids: Sequence[str], run_ids: Mapping[str, str | None]
) -> dict[str | None, list[str]]:
    """Return a dict from the id of each training run to the ids of the run's groups. A ledger has
    several runs if the proxy's server got another model. Each run may therefore have another
    tokenizer.

    >>> by_run(["a", "b", "c"], {"a": "one", "b": "two", "c": "one"})
    {'one': ['a', 'c'], 'two': ['b']}
    """
    found: dict[str | None, list[str]] = {}
    for group_id in group_ids:
        found.setdefault(run_ids.get(group_id), []).append(group_id)
    return found


def spread(group_ids: Sequence[str], num: int) -> list[str]:
    """Return at most `num` of the group ids, at equal distances from each other.

    >>> spread(["a", "b", "c", "d", "e"], 2), spread(["a"], 2)
    (['a', 'c'], ['a'])
    """
    num = min(num, len(group_ids))
    return [group_ids[at * len(group_ids) // num] for at in range(num)]


def plain_answer(group: TrainableGroup) -> PlainAnswer | None:
    """Return the first answer of a group that has text, no tool calls, and exactly one model call.
    Return None if there is no such answer."""
    for sibling in group.record.siblings:
        calls = group.calls[sibling.index] if sibling.index < len(group.calls) else []
        is_plain = sibling.tool_calls_json is None and (sibling.text or "").strip()
        if is_plain and len(calls) == 1:
            return PlainAnswer(sibling.text or "", list(unpack_ids(calls[0].response_ids)))
    return None


def are_same_tokens(num_equal: int, num_checked: int) -> bool:
    """Return True if the model's tokenizer decoded at least half of the checked answers correctly.
    The ledger's tokens are then taken as tokens of this tokenizer. The other answers may differ
    because a parser of the server has changed their text.

    >>> are_same_tokens(7, 8), are_same_tokens(1, 8), are_same_tokens(0, 0)
    (True, False, True)
    """
    return 2 * num_equal >= num_checked
