"""What the keys do to a server: talks, and the question before each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fakevllm.sdk import batch_calls, engine_calls
from fakevllm.sdk.protocol import ENGINE_TIMEOUT_S, Backoff, ServerCall, ServerRequest, fetch
from fakevllm.sdk.types import ServerUnreachable, SwarmError
from fakevllm_adapters.protocol.swarm import EngineStatus, SuccessReply

NOT_FOUND = 404
LOOK_EVERY_S = 1.0
"""While a drain waits."""


@dataclass(frozen=True, slots=True)
class Act:
    name: str
    key: str
    question: str
    talk: Callable[[], ServerCall[str]]
    """Returns what to tell. Raises SwarmError."""


def _start() -> ServerCall[str]:
    """Does not wait: the picture shows how it boots."""
    done = yield from fetch(
        ServerRequest("/start_engine", {}, ENGINE_TIMEOUT_S), engine_calls.ControlReply
    )
    if not done.success:
        raise SwarmError(
            f"The engine was not started: {done.error}. Its job comes from `fakevllm serve` or "
            "from a client."
        )
    return "The engine is being started."


def _stop() -> ServerCall[str]:
    yield from engine_calls.stop()
    return "The engine is off."


def _pause() -> ServerCall[str]:
    yield from _said("/pause_claims")
    return "No new episode begins; r lets them begin again."


def _resume() -> ServerCall[str]:
    yield from _said("/resume_claims")
    return "Episodes begin again."


def _drain() -> ServerCall[str]:
    """Called off by a resume, from anywhere; a stop is its end too. A server that does not answer
    is fetch again: what it was told to pause stays paused."""
    yield from _said("/pause_claims")
    patience = Backoff(None, LOOK_EVERY_S)
    while True:
        why = "a drain waits for the last episodes and their step"
        try:
            if told := (yield from _drained()):
                return told
        except ServerUnreachable as error:
            why = error.detail
        yield from patience.pause(why)


def _drained() -> ServerCall[str | None]:
    """What to tell once nothing is played and no step is due, and the engine is off."""
    known = yield from engine_calls.status()
    if known.engine_status is EngineStatus.OFFLINE:
        return "The engine is off."
    if not known.claims_paused:
        raise SwarmError("The drain was called off: episodes begin again.")
    playing = (yield from batch_calls.pool_information()).running_episode_details
    is_stepping = known.engine_status is not EngineStatus.ROLLING or known.backlog >= 1
    return None if playing or is_stepping else (yield from _stop())


def _said(path: str) -> ServerCall[None]:
    try:
        done = yield from fetch(ServerRequest(path, {}), SuccessReply)
    except SwarmError as error:
        if error.status != NOT_FOUND:
            raise
        raise SwarmError(f"This server has no {path}: it is another one's, or older.") from None
    if not done.success:
        raise SwarmError(done.failure_reason)


ACTS: tuple[Act, ...] = (
    Act("start", "s", "Start the engine, with the job that the server has?", _start),
    Act(
        "stop",
        "x",
        "Stop the engine? The step in hand is ended and saved; running episodes are given up, and "
        "apps get no answers.",
        _stop,
    ),
    Act(
        "pause",
        "p",
        "Pause? No new episode begins; those that run go on. A proxy's requests are not held back "
        "(`fakevllm pause` does that).",
        _pause,
    ),
    Act("resume", "r", "Let new episodes begin again?", _resume),
    Act(
        "drain",
        "d",
        "Drain? No new episode begins; once those that run have ended, and their step is taken "
        "where one is due, the engine is stopped.",
        _drain,
    ),
)
