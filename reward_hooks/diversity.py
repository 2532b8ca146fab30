"""Reward good answers that differ from the other answers of their group.

An answer that is not good enough gets 0. Therefore a bad answer never gains by being different.
Near copies form a cluster and share one bonus: eight near copies together earn the bonus of one
answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fakevllm.hooks.spec import Json, Sibling

QUALITY = 1.0
"""Reward of every answer that is good enough."""
BONUS = 0.5
"""Additional reward of an answer that is unlike all others. The answers of a cluster of near copies
share one bonus."""
COPY_SIMILARITY = 0.9
"""Two texts count as near copies if the Jaccard similarity of their sets of word n-grams is at
least this number."""
NGRAM_WORDS = 5
"""Number of words in an n-gram."""
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
"""Scripts without spaces: Thai, Lao, Burmese, Khmer, Japanese, Chinese. Each character counts as a
word."""
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W{_UNSPACED}]+")

Ngrams = frozenset[tuple[str, ...]]


def on_compute_relative_reward(
    valid_results: list[Sibling], all_answers: list[Json], question: str
) -> list[float | None]:
    passing = [index for index, answer in enumerate(all_answers) if passes(answer)]
    clusters = clusters_of([all_answers[index].get("content") or "" for index in passing])
    rewards: list[float | None] = [0.0] * len(all_answers)
    for cluster in clusters:
        for position in cluster:
            index = passing[position]
            all_answers[index]["cluster_size"] = len(cluster)
            rewards[index] = QUALITY + BONUS / len(cluster)
    return rewards


def passes(answer: Json) -> bool:
    """Return True if the answer is good enough. Edit this function for your own criterion. By
    default, any text that is complete and not empty is good enough."""
    return answer["finish_reason"] == "stop" and bool((answer.get("content") or "").strip())


def clusters_of(texts: Sequence[str]) -> list[list[int]]:
    """Group the texts into clusters of near copies, and return the clusters. Each cluster is a list
    of indices into `texts`.

    Each text is compared with the first text of each cluster. The text joins the first cluster
    whose first text is similar enough. If there is no such cluster, the text begins a new cluster.

    >>> clusters_of(["It is 7.", "it is  7", "The answer is seven."])
    [[0, 1], [2]]
    """
    ngrams = [word_ngrams(text) for text in texts]
    clusters: list[list[int]] = []
    for index, own in enumerate(ngrams):
        for cluster in clusters:
            if similarity(own, ngrams[cluster[0]]) >= COPY_SIMILARITY:
                cluster.append(index)
                break
        else:
            clusters.append([index])
    return clusters


def word_ngrams(text: str) -> Ngrams:
    """Return the set of all n-grams of a text: its sequences of NGRAM_WORDS consecutive words. Case
    and punctuation are ignored.

    A text of at most NGRAM_WORDS words has a single n-gram, the whole text.
    """
    words = _WORD.findall(text.casefold())
    if len(words) <= NGRAM_WORDS:
        return frozenset({tuple(words)})
    starts = range(len(words) - NGRAM_WORDS + 1)
    return frozenset(tuple(words[start : start + NGRAM_WORDS]) for start in starts)


def similarity(first: Ngrams, second: Ngrams) -> float:
    """Return the Jaccard similarity of two sets of n-grams: the size of the intersection divided by
    the size of the union."""
    return len(first & second) / len(first | second)
