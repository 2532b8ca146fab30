from typing import Any

from fakevllm_adapters.protocol.swarm import EndGroupReply, EndGroupRequest, SuccessReply
from fakevllm_server.episodes import submissions
from fakevllm_server.episodes.submissions import CachedReply, SubmissionCache, hash_of

REPLY = SuccessReply(success=True)


def test_a_remembered_reply_is_found_by_its_key() -> None:
    known = SubmissionCache()
    acknowledged = CachedReply(b"x", REPLY, 1)
    known.remember("a", acknowledged, written_position=0)
    assert known.find("a") is acknowledged
    assert known.find("b") is None


def test_only_replies_that_are_in_the_journal_are_removed_from_the_cache() -> None:
    known = SubmissionCache()
    most = submissions.MAX_REMEMBERED
    for place in range(1, most + 11):
        known.remember(str(place), CachedReply(b"x", REPLY, place), written_position=3)
    found = [place for place in range(1, most + 11) if known.find(str(place))]
    assert found == list(range(4, most + 11))
    known.remember("last", CachedReply(b"x", REPLY, most + 11), written_position=most)
    assert sum(known.find(str(place)) is not None for place in range(1, most + 11)) == most - 1


def test_equal_requests_have_equal_hashes_and_different_requests_do_not() -> None:
    body = EndGroupRequest(group_id="g", rewards=[1.0, None], metadata={"a": 1, "b": [2]})
    assert hash_of(body) == hash_of(body.model_copy(deep=True))
    others = (
        {"rewards": [1.0, 0.0]},
        {"rewards": [1.0]},
        {"served": 0},
        {"task_id": "t"},
    )
    hashes = {hash_of(body.model_copy(update=other)) for other in others}
    assert len(hashes) == len(others) and hash_of(body) not in hashes


def test_metadata_does_not_change_the_hash_and_may_be_deeply_nested() -> None:
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"a": deep}
    plain = EndGroupRequest(group_id="g", rewards=[1.0])
    assert hash_of(plain.model_copy(update={"metadata": deep})) == hash_of(plain)
    assert hash_of(plain.model_copy(update={"rewards": [0.5]})) != hash_of(plain)


def test_only_the_newest_replies_keep_their_calls() -> None:
    """The calls of a reply may be megabytes."""
    known = SubmissionCache()
    most = submissions.MAX_WITH_CALLS
    reply = EndGroupReply(success=True, pooled=True, calls=[[]])
    for place in range(most + 10):
        known.remember(str(place), CachedReply(b"x", reply, place), written_position=0)
    found = [known.find(str(place)) for place in range(most + 10)]
    assert [one is not None and one.reply == reply for one in found] == [False] * 10 + [True] * most
    slim = reply.model_copy(update={"calls": []})
    assert all(one is not None and one.reply == slim for one in found[:10])
