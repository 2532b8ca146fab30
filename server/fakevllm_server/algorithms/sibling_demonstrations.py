"""Make demonstrations of the answers of a group. The answers are compared by their advantages.

    sft  the answer with the highest advantage, if it is above 0
    dpo  the answers with the highest and the lowest advantage, if the two differ
    kto  each answer with an advantage above 0 (desirable) or below 0 (undesirable)

With equal advantages, the answer with the lower index is taken. An answer is an episode of one or
more calls, and each call becomes a demonstration. In `dpo`, the calls of an episode count as one
response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fakevllm_server.types.backend import Call
from fakevllm_server.types.demonstrations import Demonstration, DemonstrationKind


def sibling_demonstrations(
    group_id: str, by_sibling: Mapping[int, Sequence[Call]], loss: str
) -> dict[int, list[Demonstration]]:
    """Return the demonstrations of one group for the demonstration loss `loss`, by the index of
    the answer. Answers that are not used are absent.

    `by_sibling` has the calls of each answer, with their advantages. Calls without a response are
    left out.
    """
    scores = {
        index: score
        for index, calls in by_sibling.items()
        if (score := _mean_advantage(calls)) is not None
    }
    return {
        index: [
            Demonstration(
                group_id,
                call.prompt_ids,
                call.response_ids,
                kind,
                group_id if loss == "dpo" else None,
            )
            for call in by_sibling[index]
            if call.response_ids
        ]
        for index, kind in _kinds(scores, loss).items()
    }


def _kinds(scores: Mapping[int, float], loss: str) -> dict[int, DemonstrationKind]:
    """Return the kind of each demonstration by the index of the answer. `scores` has an advantage
    for each answer."""
    order = sorted(scores)
    if not order:
        return {}
    if loss == "kto":
        return {
            index: "desirable" if scores[index] > 0 else "undesirable"
            for index in order
            if scores[index] != 0
        }
    best, worst = max(order, key=scores.__getitem__), min(order, key=scores.__getitem__)
    if loss == "sft":
        return {best: "plain"} if scores[best] > 0 else {}
    assert loss == "dpo", f"{loss} is no demonstration loss"
    return {best: "chosen", worst: "rejected"} if scores[best] > scores[worst] else {}


def _mean_advantage(calls: Sequence[Call]) -> float | None:
    """Return the mean advantage of an answer's trained tokens, or None if it has no such token."""
    values = [value for call in calls for value in call.advantages]
    return sum(values) / len(values) if values else None
