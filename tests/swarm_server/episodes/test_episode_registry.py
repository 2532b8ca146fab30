import pytest
from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.episodes.episode_registry import (
    MAX_CLAIMED,
    EpisodeRefused,
    EpisodeRegistry,
    Idempotency,
    max_claims,
)
from fakevllm_server.episodes.submissions import IdempotencyConflict


def test_a_claimed_episode_is_found_by_its_key_and_keeps_its_calls() -> None:
    episodes = EpisodeRegistry()
    episode = episodes.claim("me", "train", 60.0, now=0.0)
    assert episodes.find_by_key(episode.key) is episode
    episodes.call_begins(episode, now=1.0)
    episode.calls.append(call())
    episodes.call_ends(episode, now=2.0)
    assert len(episodes.end(episode.uuid, "me").calls) == 1
    assert episodes.find_by_key(episode.key) is None


def test_ending_an_expired_claim_is_refused_and_the_next_claim_gets_its_episode() -> None:
    episodes = EpisodeRegistry()
    first = episodes.claim("me", "train", 10.0, now=0.0)
    assert episodes.sweep(now=11.0) == [first]
    late = r"is not in claimed status, maybe you take \*\*too long\*\* to submit"
    with pytest.raises(EpisodeRefused, match=late) as refused:
        episodes.end(first.uuid, "me")
    assert refused.value.status == 400
    second = episodes.claim("me", "train", 10.0, now=12.0)
    assert (second.episode_id, second.epoch) == (first.episode_id, 2)
    assert second.uuid != first.uuid and second.key != first.key
    assert episodes.find_by_key(first.key) is None
    with pytest.raises(EpisodeRefused, match=late):
        episodes.end(first.uuid, "me")
    assert episodes.find(second.uuid) is second


def test_an_unknown_episode_is_refused_with_the_protocol_text() -> None:
    with pytest.raises(EpisodeRefused, match=r"^Episode nope not found\.$") as refused:
        EpisodeRegistry().end("nope", "me")
    assert refused.value.status == 400


def test_another_client_cannot_end_an_episode() -> None:
    episodes = EpisodeRegistry()
    episode = episodes.claim("me", "train", 60.0, now=0.0)
    with pytest.raises(
        EpisodeRefused, match="is claimed by different client: me, but got you"
    ) as refused:
        episodes.end(episode.uuid, "you")
    assert refused.value.status == 404
    assert episodes.find(episode.uuid) is episode


def test_another_client_cannot_abort_an_episode() -> None:
    episodes = EpisodeRegistry()
    episode = episodes.claim("me", "train", 60.0, now=0.0)
    episodes.abort(episode.uuid, "you")
    assert episodes.num_claimed == 1
    episodes.abort(episode.uuid, "me")
    assert episodes.num_claimed == 0


def test_an_idle_episode_expires_but_an_episode_with_a_running_call_does_not() -> None:
    episodes = EpisodeRegistry()
    idle = episodes.claim("me", "train", 10.0, now=0.0)
    busy = episodes.claim("me", "train", 10.0, now=0.0)
    episodes.call_begins(busy, now=0.0)
    assert episodes.sweep(now=11.0) == [idle]
    episodes.call_ends(busy, now=20.0)
    assert episodes.sweep(now=25.0) == []
    assert episodes.sweep(now=31.0) == [busy]


def test_the_number_of_claimed_episodes_is_limited() -> None:
    episodes = EpisodeRegistry()
    assert episodes.can_claim(1)
    episodes.claim("me", "eval", 10.0, now=0.0)
    assert not episodes.can_claim(1)
    assert episodes.num_training == 0


def test_a_repeated_claim_returns_the_same_episode_to_its_client_while_it_is_valid() -> None:
    episodes, once = EpisodeRegistry(), Idempotency("once", b"so")
    hers = episodes.claim("me", "train", 60.0, 0.0, "ann", once)
    assert episodes.find_claim("me", "ann", once) is hers
    assert episodes.find_claim("you", "ann", once) is None
    assert episodes.find_claim("me", "bob", once) is None
    assert episodes.find_claim("me", "ann", Idempotency("twice", b"so")) is None
    with pytest.raises(IdempotencyConflict):
        episodes.find_claim("me", "ann", Idempotency("once", b"otherwise"))
    episodes.abort(hers.uuid, "me")
    assert episodes.find_claim("me", "ann", once) is None


def test_only_the_api_key_that_claimed_an_episode_may_use_it() -> None:
    episodes = EpisodeRegistry()
    hers = episodes.claim("me", "train", 60.0, now=0.0, owner="ann")
    episodes.check_owner(hers.uuid, "ann")
    words = f"^Episode {hers.uuid} is claimed by different client: ann, but got bob\\.$"
    with pytest.raises(EpisodeRefused, match=words) as refused:
        episodes.check_owner(hers.uuid, "bob")
    assert refused.value.status == 404


def test_without_an_api_key_on_either_side_every_client_may_use_an_episode() -> None:
    episodes = EpisodeRegistry()
    nobodys = episodes.claim("me", "train", 60.0, now=0.0)
    hers = episodes.claim("me", "train", 60.0, now=0.0, owner="ann")
    episodes.check_owner(nobodys.uuid, "ann")
    episodes.check_owner(hers.uuid, "")
    episodes.check_owner("unknown", "ann")


def test_a_reopened_episode_belongs_to_the_owner_of_its_new_claim() -> None:
    episodes = EpisodeRegistry()
    first = episodes.claim("me", "train", 60.0, now=0.0, owner="ann")
    episodes.abort(first.uuid, "me")
    second = episodes.claim("you", "train", 60.0, now=0.0, owner="bob")
    assert second.episode_id == first.episode_id
    episodes.check_owner(second.uuid, "bob")
    episodes.check_owner(first.uuid, "ann")  # an unknown claim: its end is refused elsewhere


@pytest.mark.parametrize(
    ("batch_size", "num_repeat", "workers", "expected"),
    [
        (8, 4, None, 32),  # a batch
        (32, 4, 50, 48),  # as many whole tasks as there are workers for
        (1000, 4, None, MAX_CLAIMED),
        (8, 4, 4, 4),
    ],
)
def test_the_claim_limit_is_a_batch_of_whole_tasks(
    batch_size: int, num_repeat: int, workers: int | None, expected: int
) -> None:
    job = TrainJob(batch_size=batch_size, num_repeat=num_repeat, max_env_worker=workers)
    assert max_claims(job) == expected
