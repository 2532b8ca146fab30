"""The requests of the screen's actions, and how the actions handle the server's replies."""

from __future__ import annotations

import pytest
from proxy.sdk.scripted_calls import NO_ANSWER, reply, run_call

from fakevllm.overwatch.server_actions import SERVER_ACTIONS
from fakevllm.sdk.protocol import ServerReply
from fakevllm.sdk.types import SwarmError

DRAIN = next(action for action in SERVER_ACTIONS if action.name == "drain").call
OK = reply(success=True)
NO_RUNNING_EPISODES = reply(running_episode_details={})


def engine_status(name: str, is_paused: bool = True, backlog: float = 0.0) -> ServerReply:
    return reply(
        engine_status=f"ENGINE.{name}",
        global_step=1,
        run_id="r",
        claims_paused=is_paused,
        backlog=backlog,
    )


def test_a_drain_continues_after_the_server_did_not_answer() -> None:
    rolling = engine_status("ROLLING")
    stepping = [engine_status("WEIGHT_SYNCING"), NO_RUNNING_EPISODES]
    unanswered = [NO_ANSWER, rolling, NO_ANSWER, rolling, NO_RUNNING_EPISODES, NO_ANSWER]
    idle = [rolling, NO_RUNNING_EPISODES]
    stopped = [rolling, OK, engine_status("OFFLINE")]
    record = run_call(DRAIN(), [OK, *stepping, *unanswered, *idle, *stopped])
    assert record.result == "The engine is off."
    assert record.paths.count("/pause_claims") == record.paths.count("/stop_engine") == 1
    assert len(record.pauses) == 4


def test_a_drain_ends_if_a_restarted_server_has_forgotten_the_pause() -> None:
    with pytest.raises(SwarmError, match="drain was cancelled"):
        run_call(DRAIN(), [OK, NO_ANSWER, engine_status("ROLLING", is_paused=False)])


def test_a_drain_that_cannot_begin_raises() -> None:
    with pytest.raises(SwarmError, match="nobody answers"):
        run_call(DRAIN(), [NO_ANSWER])
