"""Turn the answers of a group into demonstrations for the losses sft, dpo and kto. The answers are
chosen by their scores. A score is the answer's reward with all penalties, minus the mean of the
group.

    sft  the answer with the highest score, if it is above 0
    dpo  the answers with the highest and the lowest score, if the two differ
    kto  each answer with a score above 0 (desirable) or below 0 (undesirable)

If several answers have the highest or the lowest score, the one with the lowest index is taken. A
difference of at most `TOLERANCE` counts as 0, because it may be a rounding error. An answer is an
episode of one or more calls, and each call becomes a demonstration. In `dpo`, the calls of an
episode count as one response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fakevllm_server.types.backend import Call
from fakevllm_server.types.demonstrations import Demonstration, DemonstrationKind

TOLERANCE = 1e-9
"""Differences between scores up to this number count as 0."""


def sibling_demonstrations(
    group_id: str, by_sibling: Mapping[int, Sequence[Call]], scores: Mapping[int, float], loss: str
) -> dict[int, list[Demonstration]]:
    """Return a dict from the index of each used answer of a group to the answer's demonstrations.
    `loss` is the demonstration loss. Answers that this loss does not use are absent.

    `by_sibling` has the calls of each answer, and `scores` has a score for each of these answers.
    Answers without a trained token, and calls without a response, are left out.
    """
    candidates = {
        index: scores[index]
        for index in sorted(by_sibling)
        if any(call.num_trained for call in by_sibling[index])
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
        for index, kind in _kinds(candidates, loss).items()
    }


def _kinds(scores: Mapping[int, float], loss: str) -> dict[int, DemonstrationKind]:
    if not scores:
        return {}
    if loss == "kto":
        return {
            index: "desirable" if score > 0 else "undesirable"
            for index, score in scores.items()
            if abs(score) > TOLERANCE
        }
    # Of equal scores, max and min take the first one, which has the lowest index.
    best, worst = max(scores, key=scores.__getitem__), min(scores, key=scores.__getitem__)
    if loss == "sft":
        return {best: "plain"} if scores[best] > TOLERANCE else {}
    assert loss == "dpo", f"{loss} is no demonstration loss"
    differ = scores[best] - scores[worst] > TOLERANCE
    return {best: "chosen", worst: "rejected"} if differ else {}
