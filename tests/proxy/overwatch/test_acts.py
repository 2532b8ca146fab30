"""What a key's act says to the server, and what it makes of each answer."""

from __future__ import annotations

import pytest
from proxy.sdk.scripted_calls import NO_ANSWER, reply, run_call

from fakevllm.overwatch.acts import ACTS
from fakevllm.sdk.protocol import ServerReply
from fakevllm.sdk.types import SwarmError

DRAIN = next(act for act in ACTS if act.name == "drain").talk
OK = reply(success=True)
NOTHING_PLAYED = reply(running_episode_details={})


def engine(name: str, is_paused: bool = True, backlog: float = 0.0) -> ServerReply:
    return reply(
        engine_status=f"ENGINE.{name}",
        global_step=1,
        run_id="r",
        claims_paused=is_paused,
        backlog=backlog,
    )


def test_a_drain_outlives_answers_that_do_not_come() -> None:
    stepping = [engine("WEIGHT_SYNCING"), NOTHING_PLAYED]
    lost = [NO_ANSWER, engine("ROLLING"), NO_ANSWER, engine("ROLLING"), NOTHING_PLAYED, NO_ANSWER]
    over = [engine("ROLLING"), NOTHING_PLAYED]
    stopped = [engine("ROLLING"), OK, engine("OFFLINE")]
    record = run_call(DRAIN(), [OK, *stepping, *lost, *over, *stopped])
    assert record.result == "The engine is off."
    assert record.paths.count("/pause_claims") == record.paths.count("/stop_engine") == 1
    assert len(record.pauses) == 4


def test_a_drain_ends_where_the_server_came_back_without_its_pause() -> None:
    with pytest.raises(SwarmError, match="called off"):
        run_call(DRAIN(), [OK, NO_ANSWER, engine("ROLLING", is_paused=False)])


def test_a_drain_that_cannot_begin_says_so() -> None:
    with pytest.raises(SwarmError, match="nobody answers"):
        run_call(DRAIN(), [NO_ANSWER])
