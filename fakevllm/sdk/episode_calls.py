"""Talks about episodes: claim, end, abort, and whether one is still there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from fakevllm.sdk.protocol import QUICK_TIMEOUT_S, Ask, Patience, Remark, Talk, asked, insisted
from fakevllm.sdk.types import EpisodeLost, SwarmError, SwarmServerOfflineError
from fakevllm_adapters.http.validation_messages import validated
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.pool import ThrottlePolicy
from fakevllm_adapters.protocol.swarm import (
    MAX_REWARD,
    CanContinueRequest,
    ClaimEpisodeReply,
    ClaimEpisodeRequest,
    EndEpisodeReply,
    EndEpisodeRequest,
    EngineStatus,
    SuccessReply,
    Task,
    WorkflowOutput,
)

EpisodeType = Literal["train", "eval"]

END_PATIENCE_S = 600.0
"""How long an end is sent again: a server restarts, and takes up its engine, well within it."""
ABORT_PATIENCE_S = 60.0
"""Where an agent failed because the server died, its claim outlives the crash; a step would wait
for it, a minute each, until it runs out."""
RENEW_PATIENCE_S = 10.0
"""A lost connection is no reason to give up what several servers have begun together."""
_GONE = (400, 404, 409, 410)


class _CanContinue(BaseModel):
    can_continue: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """One claimed episode, in the server's words."""

    episode_uuid: str
    path: str
    """Of its OpenAI routes on the server."""
    api_key: str


def begin(
    client_uuid: str,
    kind: EpisodeType,
    discard_episode_timeout: float,
    throttle_policy: ThrottlePolicy | None,
    was_on: bool = False,
) -> Talk[Claim]:
    """Waits as long as it takes for an engine, a free episode and, with a policy, this task's
    turn. A claim whose answer is lost on its way is had by asking again. Raises
    SwarmServerOfflineError where the engine is off and `was_on` before, for a server
    that is started again takes up its engine before it answers; SwarmError where the server does
    not take the request."""
    request = validated(
        ClaimEpisodeRequest,
        client_uuid=client_uuid,
        episode_type=kind,
        discard_episode_timeout=discard_episode_timeout,
        throttle_policy=throttle_policy,
        idempotency_key=new_id(),
    )
    ask = Ask("/claim_episode", request.model_dump(exclude_none=True))
    patience = Patience(None)
    while True:
        reply = yield from insisted(ask, ClaimEpisodeReply, Patience(None))
        if reply.success:
            path = "/" + reply.openai_base_url.split("://", 1)[-1].partition("/")[2]
            return Claim(reply.episode_uuid, path, reply.openai_api_key)
        is_off = EngineStatus.OFFLINE in reply.fail_cause
        if is_off and was_on:
            raise SwarmServerOfflineError(reply.fail_cause)
        was_on = was_on or not is_off
        yield from patience.pause(reply.fail_cause)


def of_task(policy: ThrottlePolicy | None, task: Task) -> ThrottlePolicy | None:
    """It names this task, where it names none."""
    if policy is None or policy.current_task_id:
        return policy
    return policy.model_copy(update={"current_task_id": task.task_id})


def end(
    client_uuid: str,
    task: Task,
    episode_uuid: str,
    output: WorkflowOutput,
    declare_client_active: bool = True,
) -> Talk[None]:
    """Returns once the server has it on disk; sent again, in the same words, until it has. Raises
    ValueError for an output that cannot be trained, EpisodeLost, SwarmError."""
    check(task, output)
    told = output.model_copy(update={"metadata": output.metadata | {"task_id": task.task_id}})
    request = validated(
        EndEpisodeRequest,
        client_uuid=client_uuid,
        episode_uuid=episode_uuid,
        task_id=task.task_id,
        workflow_output=told,
        declare_client_active=declare_client_active,
    )
    ask = Ask("/end_episode", request.model_dump())
    try:
        ended = yield from insisted(ask, EndEpisodeReply, Patience(END_PATIENCE_S))
        if ended.warning:
            told = f"episode {episode_uuid} of task {task.task_id}: {ended.warning}"
            yield Remark(ended.warning, told)
    except SwarmError as error:
        if error.status in _GONE:
            raise EpisodeLost(error.detail, error.status) from None
        raise


def check(task: Task, output: WorkflowOutput) -> None:
    """Raises ValueError, before anything is sent, for what the server would refuse."""
    if not task.task_id:
        raise ValueError(
            "task.task_id is empty: episodes of one task are compared with each other by it."
        )
    reward = output.reward
    if not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:
        raise ValueError(
            f"WorkflowOutput.reward must be one finite number, at most {MAX_REWARD:g} either way, "
            f"got {reward!r}; "
            "abort_episode() gives an episode up that has none."
        )


def abort(client_uuid: str, episode_uuid: str, declare_client_active: bool = True) -> Talk[None]:
    """Raises SwarmError; the server gives up by itself what nobody ends."""
    ask = _abort(client_uuid, episode_uuid, declare_client_active, QUICK_TIMEOUT_S)
    yield from insisted(ask, SuccessReply, Patience(ABORT_PATIENCE_S))


def give_up(client_uuid: str, episode_uuid: str, timeout_s: float) -> Talk[None]:
    """An abort that is said once. Raises SwarmError."""
    yield from asked(_abort(client_uuid, episode_uuid, False, timeout_s), SuccessReply)


def can_continue(client_uuid: str, episode_uuid: str) -> Talk[bool]:
    """Raises SwarmError."""
    reply = yield from asked(
        _about(client_uuid, episode_uuid, "/can_continue_episode"), _CanContinue
    )
    return reply.can_continue


def renew(client_uuid: str, episode_uuid: str) -> Talk[None]:
    """A sign of life, for agents that are long silent between their calls. Raises EpisodeLost,
    SwarmError."""
    try:
        ask = _about(client_uuid, episode_uuid, "/renew_episode")
        yield from insisted(ask, SuccessReply, Patience(RENEW_PATIENCE_S))
    except SwarmError as error:
        if error.status in _GONE:
            raise EpisodeLost(error.detail, error.status) from None
        raise


def _abort(client_uuid: str, episode_uuid: str, is_active: bool, timeout_s: float) -> Ask:
    request = EndEpisodeRequest(
        client_uuid=client_uuid,
        episode_uuid=episode_uuid,
        workflow_output=WorkflowOutput(reward=0.0),
        declare_client_active=is_active,
    )
    return Ask("/abort_episode", request.model_dump(), timeout_s)


def _about(client_uuid: str, episode_uuid: str, path: str) -> Ask:
    request = CanContinueRequest(client_uuid=client_uuid, episode_uuid=episode_uuid)
    return Ask(path, request.model_dump(), QUICK_TIMEOUT_S)
