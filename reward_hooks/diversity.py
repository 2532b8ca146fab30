"""Pays for answers that differ from their siblings, once they are good enough.

Quality is a gate: an answer that does not pass gets 0, so being odd never pays by itself. Near
copies share one bonus between them: saying the same thing eight times earns what saying it once
does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fakevllm.hooks.spec import Json, Sibling

QUALITY = 1.0
"""What every answer that passes gets."""
BONUS = 0.5
"""What an answer unlike all others gets on top; those of one cluster share it."""
SAME = 0.9
"""Two texts are copies from this share of common word runs on."""
RUN = 5
"""Words in a run."""
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
"""Thai, Lao, Burmese, Khmer, Japanese, Chinese: without spaces each character is a word."""
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    passing = [index for index, answer in enumerate(all_answers) if passes(answer)]
    clusters = clusters_of([all_answers[index].get("content") or "" for index in passing])
    rewards: list[float | None] = [0.0] * len(all_answers)
    for cluster in clusters:
        for place in cluster:
            index = passing[place]
            all_answers[index]["cluster_size"] = len(cluster)
            rewards[index] = QUALITY + BONUS / len(cluster)
    return rewards


def passes(answer: Json) -> bool:
    """Yours to write: what an answer must be before its difference counts."""
    return answer["finish_reason"] == "stop" and bool((answer.get("content") or "").strip())


def clusters_of(texts: Sequence[str]) -> list[list[int]]:
    """Indices of near copies together; a text joins the first cluster whose first text it copies.

    >>> clusters_of(["It is 7.", "it is  7", "The answer is seven."])
    [[0, 1], [2]]
    """
    all_runs = [word_runs(text) for text in texts]
    clusters: list[list[int]] = []
    for index, own in enumerate(all_runs):
        for cluster in clusters:
            if likeness(own, all_runs[cluster[0]]) >= SAME:
                cluster.append(index)
                break
        else:
            clusters.append([index])
    return clusters


def word_runs(text: str) -> frozenset[tuple[str, ...]]:
    """Runs of RUN words, without case and punctuation; a shorter text is one run."""
    words = _WORD.findall(text.casefold())
    if len(words) <= RUN:
        return frozenset({tuple(words)})
    return frozenset(tuple(words[at : at + RUN]) for at in range(len(words) - RUN + 1))


def likeness(one: frozenset[tuple[str, ...]], other: frozenset[tuple[str, ...]]) -> float:
    """Jaccard: what both have of what either has."""
    return len(one & other) / len(one | other)
