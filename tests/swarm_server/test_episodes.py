import pytest
from swarm_server.samples import call

from fakevllm_server import episodes as module
from fakevllm_server.episodes import EpisodeRefused, Episodes


def test_a_claimed_episode_is_found_by_its_key_and_keeps_its_calls() -> None:
    episodes = Episodes()
    episode = episodes.claim("me", "train", 60.0, now=0.0)
    assert episodes.of_key(episode.key) is episode
    episodes.call_begins(episode, now=1.0)
    episode.calls.append(call())
    episodes.call_ends(episode, now=2.0)
    ended = episodes.end(episode.uuid, "me")
    assert ended is not None and len(ended.calls) == 1
    assert episodes.of_key(episode.key) is None


def test_ending_twice_is_a_repeat_and_not_a_second_episode() -> None:
    episodes = Episodes()
    episode = episodes.claim("me", "train", 60.0, now=0.0)
    assert episodes.end(episode.uuid, "me") is not None
    assert episodes.end(episode.uuid, "me") is None


def test_an_unknown_episode_is_refused_with_the_protocol_text() -> None:
    with pytest.raises(EpisodeRefused, match=r"^Episode nope not found\.$") as refused:
        Episodes().end("nope", "me")
    assert refused.value.status == 400


def test_a_foreign_end_changes_nothing() -> None:
    episodes = Episodes()
    episode = episodes.claim("me", "train", 60.0, now=0.0)
    with pytest.raises(
        EpisodeRefused, match="is claimed by different client: me, but got you"
    ) as refused:
        episodes.end(episode.uuid, "you")
    assert refused.value.status == 404
    assert episodes.find(episode.uuid) is episode


def test_a_foreign_abort_changes_nothing() -> None:
    episodes = Episodes()
    episode = episodes.claim("me", "train", 60.0, now=0.0)
    episodes.abort(episode.uuid, "you")
    assert episodes.num_claimed == 1
    episodes.abort(episode.uuid, "me")
    assert episodes.num_claimed == 0


def test_an_idle_episode_is_swept_but_not_one_with_a_call_in_flight() -> None:
    episodes = Episodes()
    idle = episodes.claim("me", "train", 10.0, now=0.0)
    busy = episodes.claim("me", "train", 10.0, now=0.0)
    episodes.call_begins(busy, now=0.0)
    assert episodes.sweep(now=11.0) == [idle.uuid]
    episodes.call_ends(busy, now=20.0)
    assert episodes.sweep(now=25.0) == []
    assert episodes.sweep(now=31.0) == [busy.uuid]


def test_only_so_many_may_be_claimed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLAIMED", 1)
    episodes = Episodes()
    assert episodes.can_claim()
    episodes.claim("me", "eval", 10.0, now=0.0)
    assert not episodes.can_claim()
    assert episodes.num_training == 0
