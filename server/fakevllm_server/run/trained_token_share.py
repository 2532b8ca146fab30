"""Metrics about the share of sampled tokens that is trained, and about the reasons why the other
tokens are not trained.

    sample_coverage = tokens trained / tokens eligible

* Eligible tokens belong to calls that have complete ids and log-probabilities, and sampling
  parameters that allow training.
* `untrainable` metrics count the calls and tokens that are not eligible, by reason.
* `untrained` metrics count the eligible tokens that the step did not train on, by reason.
* Forced tokens are not eligible. A forced token was the only token that a grammar allowed at its
  position.

The functions do no I/O.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from fakevllm_server.types.backend import Call
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode

MAX_REASON_CHARS = 40
"""Maximum length of a reason within a metric's name, in characters."""
_ADDITIVE = re.compile(
    r"tokens_(sampled|eligible|trained|saved|computed)|(untrainable|untrained)_.*|branch_(?!rate$).*"
    r"|groups(_with_signal)?|(tied|partial)_groups|feedback_samples|edits|stale_calls"
)


def coverage(groups: Sequence[FinishedGroup], trained: Sequence[Call]) -> dict[str, float]:
    """Return the metrics of one training step about the share of its sampled tokens that is
    trained.

    `groups` are the step's groups. `trained` are the calls that the step trains on. Feedback
    samples are answers that are trained again after later feedback. Feedback samples are not
    counted, because their tokens were counted with their original groups.
    """
    groups = [group for group in groups if not group.is_sample]
    ids = {group.group_id for group in groups}
    trained = [call for call in trained if call.group_id in ids]
    counts: Counter[str] = Counter()
    for reason, call in _untrainable(groups):
        counts["untrainable_calls"] += 1
        counts["untrainable_tokens"] += len(call.response_ids)
        counts[f"untrainable_calls_{reason}"] += 1
        counts[f"untrainable_tokens_{reason}"] += len(call.response_ids)
    calls = [call for group in groups for episode in group.episodes for call in episode.calls]
    num_eligible = sum(call.num_trained for call in calls if untrainable_reason(call) is None)
    num_trained = sum(call.num_trained for call in trained)
    num_unscored = _num_unscored(groups)
    totals = {
        "tokens_sampled": sum(len(call.response_ids) for call in calls),
        "tokens_eligible": num_eligible,
        "tokens_trained": num_trained,
        "untrainable_calls": 0,
        "untrainable_tokens": 0,
        "untrained_tokens_no_reward": num_unscored,
        "untrained_tokens_no_signal": num_eligible - num_trained - num_unscored,
    }
    metrics = {name: float(number) for name, number in (totals | counts).items()}
    return metrics | {"sample_coverage": share(num_trained, num_eligible)}


def without_update(metrics: Mapping[str, float], reason: str) -> dict[str, float]:
    """Return the coverage metrics of a step whose weight update was not applied. `metrics` are the
    metrics that the step would have if the update had been applied.

    The tokens that the step should have trained count as untrained, in the metric
    `untrained_tokens_<reason>`.
    """
    return {
        **metrics,
        "tokens_trained": 0.0,
        f"untrained_tokens_{reason}": metrics["tokens_trained"],
        "sample_coverage": share(0, metrics["tokens_eligible"]),
    }


def without_calls(
    metrics: Mapping[str, float], lost: Sequence[Call], groups: Sequence[FinishedGroup]
) -> dict[str, float]:
    """Return the coverage metrics of a step that has stopped before it trained the calls `lost`,
    because a value was not finite. `metrics` are those that the step would have otherwise."""
    samples = {group.group_id for group in groups if group.is_sample}
    num_lost = sum(call.num_trained for call in lost if call.group_id not in samples)
    num_of_samples = sum(call.num_trained for call in lost if call.group_id in samples)
    num_trained = metrics["tokens_trained"] - num_lost
    changed = {
        "tokens_trained": num_trained,
        "untrained_tokens_not_finite": float(num_lost),
        "sample_coverage": share(num_trained, metrics["tokens_eligible"]),
    }
    if "feedback_tokens" in metrics:
        changed["feedback_tokens"] = metrics["feedback_tokens"] - num_of_samples
    return {**metrics, **changed}


def untrainable_reason(call: RecordedCall) -> str | None:
    """Return a short name for the reason why a call must not be trained on. The name is used in a
    metric's name. Return None if the call may be trained on.

    `call.untrainable` has the full text of the reason.

    >>> from fakevllm_server.types.calls import RecordedCall
    >>> untrainable_reason(RecordedCall([1], [2], None, [], 1.0, "stop", None))
    'missing_logprob'
    """
    if call.untrainable is not None:
        return _metric_name_part(call.untrainable)
    if call.logprobs is None or len(call.logprobs) != len(call.response_ids):
        return "missing_logprob"
    return None


def additive_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step that can be summed over the steps of a run."""
    return {name: value for name, value in metrics.items() if _ADDITIVE.fullmatch(name)}


def run_totals(sums: Mapping[str, float]) -> dict[str, float]:
    """Return a run's totals: the given sums of metrics, and the ratios that are computed from these
    sums, such as `sample_coverage`."""
    num_later = sum(value for name, value in sums.items() if name.startswith("branch_"))
    num_later -= sums.get("branch_first", 0.0)
    num_branched = num_later - sums.get("branch_extends", 0.0)
    return {
        **sums,
        "sample_coverage": share(sums.get("tokens_trained", 0), sums.get("tokens_eligible", 0)),
        **({"branch_rate": num_branched / num_later} if num_later else {}),
    }


def share(part: float, whole: float) -> float:
    """Return the ratio `part` / `whole`, or 1 if `whole` is 0."""
    return part / whole if whole else 1.0


def _untrainable(groups: Sequence[FinishedGroup]) -> Iterator[tuple[str, RecordedCall]]:
    """Yield (reason, call) for each call that must not be trained on."""
    for group in groups:
        for episode in group.episodes:
            for call in episode.calls:
                reason = untrainable_reason(call)
                if reason is not None:
                    yield reason, call


def _num_unscored(groups: Sequence[FinishedGroup]) -> int:
    """Return the number of eligible tokens in the episodes without a reward. Tokens are eligible if
    they could be trained on."""
    episodes = [episode for group in groups for episode in group.episodes]
    return sum(_num_eligible(episode) for episode in episodes if episode.reward is None)


def _num_eligible(episode: ScoredEpisode) -> int:
    """Return the number of eligible tokens in an episode. Tokens are eligible if they could be
    trained on."""
    return sum(call.num_trained for call in episode.calls if untrainable_reason(call) is None)


def _metric_name_part(reason: str) -> str:
    """Return the part of a reason before its first colon. Characters that a metric's name may not
    have are replaced by underscores.

    >>> _metric_name_part("sampling_not_trainable: top_p, min_p")
    'sampling_not_trainable'
    """
    part = re.sub(r"[^a-z0-9]+", "_", reason.partition(":")[0].lower())
    return part.strip("_")[:MAX_REASON_CHARS] or "unknown"
