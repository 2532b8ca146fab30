from swarm_server.samples import call

from fakevllm_server.algorithms.staleness import keep_fresh, only_one_version
from fakevllm_server.types.calls import FinishedGroup, RecordedCall, ScoredEpisode, VersionSpan


def group(*episodes: list[RecordedCall]) -> FinishedGroup:
    return FinishedGroup(
        "g", [ScoredEpisode(at, float(at), calls) for at, calls in enumerate(episodes)]
    )


def test_calls_within_the_limit_are_kept() -> None:
    fresh = group([call(version=3)], [call(version=7)])
    assert keep_fresh(fresh, 7, 4) == (fresh, 0)


def test_a_stale_call_is_removed_and_its_episode_is_kept() -> None:
    kept, num_dropped = keep_fresh(group([call(version=2), call(version=5)], [call(5)]), 7, 4)
    assert num_dropped == 1
    assert [[call.version for call in episode.calls] for episode in kept.episodes] == [[5], [5]]
    assert kept.rewards == [0.0, 1.0]


def test_an_episode_without_a_fresh_call_is_removed_with_its_reward() -> None:
    kept, num_dropped = keep_fresh(group([call(version=2)], [call(5)], [call(6)]), 7, 4)
    assert num_dropped == 1
    assert kept.rewards == [1.0, 2.0]


def test_the_age_of_a_call_is_that_of_its_oldest_weights() -> None:
    spans = [VersionSpan(2, 0, 1), VersionSpan(6, 1, 2)]
    mixed = RecordedCall([1], [2, 3], [-1.0, -1.0], spans, 1.0, "stop", None)
    assert keep_fresh(group([mixed]), 7, 4)[1] == 1
    assert keep_fresh(group([mixed]), 6, 4)[1] == 0


def test_only_a_call_of_several_versions_becomes_untrainable_and_an_earlier_reason_stays() -> None:
    spans = [VersionSpan(2, 0, 1), VersionSpan(6, 1, 2)]
    mixed = RecordedCall([1], [2, 3], [-1.0, -1.0], spans, 1.0, "stop", None)
    assert (only_one_version(mixed).untrainable or "").startswith("several_versions: ")
    assert only_one_version(call(2)) == call(2)
    greedy = RecordedCall([1], [2, 3], [-1.0, -1.0], spans, 0.0, "stop", "greedy")
    assert only_one_version(greedy) == greedy
