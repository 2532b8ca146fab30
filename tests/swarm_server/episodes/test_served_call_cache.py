"""Served calls are remembered for the next turns of their sessions, up to a limit of tokens."""

from __future__ import annotations

from dataclasses import replace

from swarm_server.samples import call

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import SiblingRef
from fakevllm_server.episodes.group_pool import Pool
from fakevllm_server.episodes.served_call_cache import ServedCalls

TEN = replace(call(), prompt_ids=list(range(8)), response_ids=[1, 2], logprobs=[-1.0, -1.0])


def test_the_oldest_call_is_removed_when_the_token_limit_is_exceeded() -> None:
    served = ServedCalls(max_tokens=25)
    for name in ("a", "b", "c"):
        served.remember(name, [TEN])
    assert [served.find(name) for name in ("a", "b", "c")] == [None, TEN, TEN]


def test_a_call_that_is_remembered_twice_counts_once() -> None:
    served = ServedCalls(max_tokens=25)
    for name in ("a", "a", "b"):
        served.remember(name, [TEN])
    assert served.find("a") == served.find("b") == TEN


def test_a_group_follows_the_call_that_was_served_in_its_parent() -> None:
    pool = Pool(TrainJob(batch_size=2))
    calls = {name: replace(TEN, prompt_ids=[at]) for at, name in enumerate("abcd")}
    for (group, index), one in zip(
        [("first", 0), ("first", 1), ("next", 0), ("next", 1)], calls.values(), strict=True
    ):
        pool.add_call(SiblingRef(group, index), one, now=0.0)
    pool.end_group("first", [0.0, 1.0], 1, served=1)
    pool.end_group("next", [0.0, 1.0], 1, served=0, parent_id="first")
    first, then = pool.take(version=0).groups
    assert (first.follows, then.follows) == (None, calls["b"])
