"""The actions that the user can start on the server with a key of the keyboard: start, stop, pause,
resume and drain.

This module does no I/O. Each action is a `ServerCall`: a generator that tells a driver which
requests to send and when to wait (see `sdk/protocol`). Before an action starts, the user must
confirm it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fakevllm.sdk import engine_control
from fakevllm.sdk.protocol import ENGINE_TIMEOUT_S, Backoff, ServerCall, ServerRequest, fetch
from fakevllm.sdk.types import ServerUnreachable, SwarmError
from fakevllm_adapters.protocol.swarm import EngineStatus, SuccessReply

NOT_FOUND = 404
DRAIN_POLL_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class ServerAction:
    """An action on the server. The object has the action's name, the key that starts the action,
    and the question that the user must confirm."""

    name: str
    key: str
    question: str
    call: Callable[[], ServerCall[str]]
    """Function that creates the server call of the action. The call returns a message for the user.
    It raises SwarmError if the action fails."""


def _start() -> ServerCall[str]:
    """Ask the server to start its engine, and return before the engine is ready. The screen shows
    the progress of the start."""
    reply = yield from fetch(
        ServerRequest("/start_engine", {}, ENGINE_TIMEOUT_S), engine_control.ControlReply
    )
    if not reply.success:
        raise SwarmError(
            f"The engine was not started: {reply.error}. Its job comes from `fakevllm serve` or "
            "from a client."
        )
    return "The engine is being started."


def _stop() -> ServerCall[str]:
    yield from engine_control.stop()
    return "The engine is off."


def _pause() -> ServerCall[str]:
    yield from _post("/pause_claims")
    return "Episode claims are paused; press r to resume."


def _resume() -> ServerCall[str]:
    yield from _post("/resume_claims")
    return "Episode claims are resumed."


def _drain() -> ServerCall[str]:
    """Pause episode claims, so that clients get no new episodes. Wait until no episode runs and no
    training step is due. Then stop the engine.

    Any client may cancel the drain by resuming claims, or end it early by stopping the engine. If
    the server stops answering, the drain goes on polling, because the claims at the server stay
    paused.
    """
    yield from _post("/pause_claims")
    backoff = Backoff(None, DRAIN_POLL_INTERVAL_S)
    while True:
        reason = "a drain waits for the last episodes and their step"
        try:
            if message := (yield from _stop_if_idle()):
                return message
        except ServerUnreachable as error:
            reason = error.detail
        yield from backoff.pause(reason)


def _stop_if_idle() -> ServerCall[str | None]:
    """Stop the engine if no episode runs and no training step is due.

    Return a message for the user if the engine is off after this call, else None. Pause episode
    claims before this call. Raises SwarmError if somebody has resumed the claims in the meantime.
    """
    status = yield from engine_control.status()
    if status.engine_status is EngineStatus.OFFLINE:
        return "The engine is off."
    if not status.claims_paused:
        raise SwarmError("The drain was cancelled: somebody resumed episode claims.")
    pool = yield from engine_control.pool_information()
    is_busy = bool(pool.running_episode_details) or not status.is_between_steps
    return None if is_busy else (yield from _stop())


def _post(path: str) -> ServerCall[None]:
    """Send a POST request with an empty JSON object to a path of the server. Raises SwarmError if
    the server has no such path or refuses the request."""
    try:
        reply = yield from fetch(ServerRequest(path, {}), SuccessReply)
    except SwarmError as error:
        if error.status != NOT_FOUND:
            raise
        raise SwarmError(
            f"This server has no {path}: it is another program, or an older version."
        ) from None
    if not reply.success:
        raise SwarmError(reply.failure_reason)


SERVER_ACTIONS: tuple[ServerAction, ...] = (
    ServerAction("start", "s", "Start the engine with the server's current job?", _start),
    ServerAction(
        "stop",
        "x",
        "Stop the engine? The server finishes and saves the current step. Running episodes are "
        "aborted, and requests from apps fail.",
        _stop,
    ),
    ServerAction(
        "pause",
        "p",
        "Pause episode claims? No new episode can be claimed; running episodes continue. Requests "
        "through a proxy are not held back (`fakevllm pause` does that).",
        _pause,
    ),
    ServerAction("resume", "r", "Resume episode claims?", _resume),
    ServerAction(
        "drain",
        "d",
        "Drain the server? No new episode can be claimed. The engine is stopped when the running "
        "episodes have ended and the step that is due, if any, has been trained.",
        _drain,
    ),
)
