"""Pair the prompts of a step with responses to other prompts, for the KL estimate of `kto`.

TRL pairs the prompt of each row of a batch with the response of the row before it. In a group of
siblings, that response would belong to the same prompt. Therefore rows with equal prompts are put
side by side here, and the responses are rotated by the number of rows of the most frequent prompt.
If all prompts differ, the result is TRL's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from fakevllm_server.types.demonstrations import Demonstration


def mismatched_pairs(rows: Sequence[Demonstration]) -> list[Demonstration]:
    """Return demonstrations of the kind `mismatched`: the prompt of each row with the response of
    a row that has another prompt. No response is used twice.

    If one prompt has more than half of the rows, some rows have no partner and are left out. The
    result is empty if all prompts are equal.

    >>> def pairs(*prompts: int) -> list[tuple[int, int]]:
    ...     rows = [Demonstration("g", [x], [at], "desirable") for at, x in enumerate(prompts)]
    ...     return [(*row.prompt_ids, *row.response_ids) for row in mismatched_pairs(rows)]
    >>> pairs(7, 8, 9)
    [(7, 2), (8, 0), (9, 1)]
    >>> pairs(7, 7, 8, 8)
    [(7, 2), (7, 3), (8, 0), (8, 1)]
    >>> pairs(7, 7)
    []
    """
    by_prompt: defaultdict[tuple[int, ...], list[Demonstration]] = defaultdict(list)
    for row in rows:
        by_prompt[tuple(row.prompt_ids)].append(row)
    order = [(prompt, row) for prompt, own in by_prompt.items() for row in own]
    shift = max(map(len, by_prompt.values()), default=0)
    return [
        replace(row, response_ids=other.response_ids, kind="mismatched")
        for at, (prompt, row) in enumerate(order)
        for other_prompt, other in [order[at - shift]]
        if other_prompt != prompt
    ]
