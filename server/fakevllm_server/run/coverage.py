"""How much of what was sampled is trained, and why the rest is not. Pure.

    sample_coverage = tokens trained / tokens that could be

Tokens that could be trained are those of calls whose ids, log-probabilities and way of sampling
training can take; the rest is `untrainable`, by reason. What could be and is not is `untrained`.
Tokens that a grammar left no choice for are in neither.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fakevllm_server.types.backend import Call
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode

MAX_WORDS = 40
"""Characters of a reason in a metric's name."""
_ADDED = re.compile(
    r"tokens_(sampled|eligible|trained|saved|computed)|(untrainable|untrained)_.*|branch_(?!rate$).*"
    r"|groups(_with_signal)?|(tied|partial)_groups|feedback_samples|stale_calls"
)


def coverage(groups: Sequence[FinishedGroup], trained: Sequence[Call]) -> dict[str, float]:
    """Of one step: its groups, and the calls it trains on. Feedback samples are left out: their
    tokens were counted with the groups they come from."""
    groups = [group for group in groups if not group.is_sample]
    ids = {group.group_id for group in groups}
    trained = [call for call in trained if call.group_id in ids]
    counts: Counter[str] = Counter()
    for reason, call in _untrainable(groups):
        counts["untrainable_calls"] += 1
        counts["untrainable_tokens"] += len(call.response_ids)
        counts[f"untrainable_calls_{reason}"] += 1
        counts[f"untrainable_tokens_{reason}"] += len(call.response_ids)
    every = [call for group in groups for episode in group.episodes for call in episode.calls]
    eligible = sum(call.num_trained for call in every if untrainable_reason(call) is None)
    done = sum(call.num_trained for call in trained)
    unscored = _unscored(groups)
    told = {
        "tokens_sampled": sum(len(call.response_ids) for call in every),
        "tokens_eligible": eligible,
        "tokens_trained": done,
        "untrainable_calls": 0,
        "untrainable_tokens": 0,
        "untrained_tokens_no_reward": unscored,
        "untrained_tokens_no_signal": eligible - done - unscored,
    }
    metrics = {name: float(number) for name, number in (told | counts).items()}
    return metrics | {"sample_coverage": share(done, eligible)}


def without_update(metrics: Mapping[str, float], reason: str) -> dict[str, float]:
    """The same step, which made no update after all."""
    lost = metrics["tokens_trained"]
    return {
        **metrics,
        "tokens_trained": 0.0,
        f"untrained_tokens_{reason}": lost,
        "sample_coverage": share(0, metrics["tokens_eligible"]),
    }


def untrainable_reason(call: RecordedCall) -> str | None:
    """As a part of a metric's name; the call has the whole reason.

    >>> from fakevllm_server.types.calls import RecordedCall
    >>> untrainable_reason(RecordedCall([1], [2], None, [], 1.0, "stop", None))
    'missing_logprob'
    """
    if call.untrainable is not None:
        return _word(call.untrainable)
    if call.logprobs is None or len(call.logprobs) != len(call.response_ids):
        return "missing_logprob"
    return None


def additive_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those of a step that add up over a run."""
    return {name: value for name, value in metrics.items() if _ADDED.fullmatch(name)}


def run_totals(sums: Mapping[str, float]) -> dict[str, float]:
    """Sums of `additive_metrics`, and the shares they make."""
    later = sum(value for name, value in sums.items() if name.startswith("branch_"))
    later -= sums.get("branch_first", 0.0)
    branched = later - sums.get("branch_extends", 0.0)
    return {
        **sums,
        "sample_coverage": share(sums.get("tokens_trained", 0), sums.get("tokens_eligible", 0)),
        **({"branch_rate": branched / later} if later else {}),
    }


def share(part: float, whole: float) -> float:
    """1 of nothing: nothing was left out."""
    return part / whole if whole else 1.0


def _untrainable(groups: Sequence[FinishedGroup]) -> Iterator[tuple[str, RecordedCall]]:
    for group in groups:
        for episode in group.episodes:
            for call in episode.calls:
                reason = untrainable_reason(call)
                if reason is not None:
                    yield reason, call


def _unscored(groups: Sequence[FinishedGroup]) -> int:
    return sum(_eligible(one) for group in groups for one in group.episodes if one.reward is None)


def _eligible(episode: ScoredEpisode) -> int:
    return sum(call.num_trained for call in episode.calls if untrainable_reason(call) is None)


def _word(reason: str) -> str:
    """
    >>> _word("sampling_not_trainable: top_p, min_p")
    'sampling_not_trainable'
    """
    first = re.sub(r"[^a-z0-9]+", "_", reason.partition(":")[0].lower())
    return first.strip("_")[:MAX_WORDS] or "unknown"
