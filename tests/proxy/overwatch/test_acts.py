"""What a key's act says to the server, and what it makes of each answer."""

from __future__ import annotations

import pytest
from proxy.sdk.scripts import NOBODY, play, said

from fakevllm.overwatch.acts import ACTS
from fakevllm.sdk.protocol import Answer
from fakevllm.sdk.types import SwarmError

DRAIN = next(act for act in ACTS if act.name == "drain").talk
OK = said(success=True)
NOTHING_PLAYED = said(running_episode_details={})


def engine(name: str, is_paused: bool = True, backlog: float = 0.0) -> Answer:
    return said(
        engine_status=f"ENGINE.{name}",
        global_step=1,
        run_id="r",
        claims_paused=is_paused,
        backlog=backlog,
    )


def test_a_drain_outlives_answers_that_do_not_come() -> None:
    stepping = [engine("WEIGHT_SYNCING"), NOTHING_PLAYED]
    lost = [NOBODY, engine("ROLLING"), NOBODY, engine("ROLLING"), NOTHING_PLAYED, NOBODY]
    over = [engine("ROLLING"), NOTHING_PLAYED]
    stopped = [engine("ROLLING"), OK, engine("OFFLINE")]
    played = play(DRAIN(), [OK, *stepping, *lost, *over, *stopped])
    assert played.result == "The engine is off."
    assert played.paths.count("/pause_claims") == played.paths.count("/stop_engine") == 1
    assert len(played.pauses) == 4


def test_a_drain_ends_where_the_server_came_back_without_its_pause() -> None:
    with pytest.raises(SwarmError, match="called off"):
        play(DRAIN(), [OK, NOBODY, engine("ROLLING", is_paused=False)])


def test_a_drain_that_cannot_begin_says_so() -> None:
    with pytest.raises(SwarmError, match="nobody answers"):
        play(DRAIN(), [NOBODY])
