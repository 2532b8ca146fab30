"""Pair each prompt of a step with a response of another group, for the KL estimate of `kto`.

The KL estimate needs a response to another request. In a batch, TRL pairs each row's prompt with
the previous row's response. If these two rows belonged to one group, the response would answer the
same request or task as the prompt. Therefore this module sorts the rows by group, and rotates the
responses by the number of rows of the largest group. A prompt then gets a response of another
group, unless one group has more than half of the rows. If every group has only one row, the pairs
are those of TRL.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from fakevllm_server.types.demonstrations import Demonstration


def mismatched_pairs(rows: Sequence[Demonstration]) -> list[Demonstration]:
    """Return demonstrations of the kind `mismatched`. Each of them has the prompt of one row
    (demonstration) and the response of a row of another group. No response is used twice.

    If one group has more than half of the rows, some of its rows have no partner and are left out.
    The result is empty if there is only one group. Pairs that are longer than the longest row are
    left out too, because they may need more memory than the trainer has.

    >>> def pairs(*groups: str) -> list[tuple[int, int]]:
    ...     rows = [Demonstration(g, [7 + at], [at], "desirable") for at, g in enumerate(groups)]
    ...     return [(*row.prompt_ids, *row.response_ids) for row in mismatched_pairs(rows)]
    >>> pairs("a", "b", "c")
    [(7, 2), (8, 0), (9, 1)]
    >>> pairs("a", "a", "b", "b")
    [(7, 2), (8, 3), (9, 0), (10, 1)]
    >>> pairs("a", "a")
    []
    """
    in_group: defaultdict[str, list[Demonstration]] = defaultdict(list)
    for row in rows:
        in_group[row.group_id].append(row)
    order = [row for own in in_group.values() for row in own]
    shift = max(map(len, in_group.values()), default=0)
    longest = max(map(_length, order), default=0)
    pairs = [
        replace(row, response_ids=other.response_ids, kind="mismatched")
        for at, row in enumerate(order)
        if (other := order[at - shift]).group_id != row.group_id
    ]
    return [pair for pair in pairs if _length(pair) <= longest]


def _length(row: Demonstration) -> int:
    return len(row.prompt_ids) + len(row.response_ids)
