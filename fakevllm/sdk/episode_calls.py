"""Requests about episodes: claim, end, abort, renew. Each function is a generator that yields
requests to a driver (see `protocol`). The driver sends the requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel

from fakevllm.sdk.protocol import (
    QUICK_TIMEOUT_S,
    Backoff,
    ServerCall,
    ServerRequest,
    ThrottledWarning,
    fetch,
    fetch_with_retries,
)
from fakevllm.sdk.types import EpisodeLost, SwarmError, SwarmServerOfflineError
from fakevllm_adapters.http.validation_messages import validated
from fakevllm_adapters.protocol.batch_status import ThrottlePolicy
from fakevllm_adapters.protocol.keys import new_id
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

END_RETRY_S = 600.0
"""Time limit in seconds for retries of the request that ends an episode. A server needs much less
time to restart and to connect to its engine."""
ABORT_RETRY_S = 60.0
"""Time limit in seconds for retries of the request that aborts an episode. If an agent fails
because the server crashed, the abort must reach the restarted server, because the claim of the
episode survives the crash. Otherwise each training step would wait up to a minute for this episode,
until the claim expires."""
RENEW_RETRY_S = 10.0
"""Time limit in seconds for retries of the request that renews an episode. Because of these
retries, a short loss of the connection does not end an agent run that uses several servers."""
_LOST_STATUSES = (400, 404, 409, 410)
"""HTTP statuses that mean that the episode is no longer claimed by this client."""


class _CanContinueReply(BaseModel):
    can_continue: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """An episode that the server has granted to this client, with the path and the API key for the
    episode's model calls."""

    episode_uuid: str
    path: str
    """Path of the episode's OpenAI routes on the server."""
    api_key: str


def begin(
    client_uuid: str,
    kind: EpisodeType,
    discard_episode_timeout: float,
    throttle_policy: ThrottlePolicy | None,
    has_seen_engine: bool = False,
) -> ServerCall[Claim]:
    """Claim an episode. Wait without a time limit until the server grants the claim, then return
    the claim.

    The server grants a claim when the engine is ready and the number of running episodes is below
    the server's limit. A claim may have a throttle policy, which limits the share of one kind of
    tasks in a batch. The server grants such a claim only when the policy allows the episode, too.
    Each claim has an idempotency key. If the reply to a claim was lost, the same request can
    therefore be sent again safely.

    Raises SwarmServerOfflineError if somebody has stopped the engine. The engine counts as stopped
    if it is off now and was running earlier, either before this call (`has_seen_engine`) or during
    the wait. A restart of the server alone raises no error, because a restarted server answers only
    after it has connected to its engine. Raises SwarmError if the server refuses the request.
    """
    request = validated(
        ClaimEpisodeRequest,
        client_uuid=client_uuid,
        episode_type=kind,
        discard_episode_timeout=discard_episode_timeout,
        throttle_policy=throttle_policy,
        idempotency_key=new_id(),
    )
    call = ServerRequest("/claim_episode", request.model_dump(exclude_none=True))
    backoff = Backoff(None)
    while True:
        reply = yield from fetch_with_retries(call, ClaimEpisodeReply, Backoff(None))
        if reply.success:
            path = "/" + reply.openai_base_url.split("://", 1)[-1].partition("/")[2]
            return Claim(reply.episode_uuid, path, reply.openai_api_key)
        is_off = EngineStatus.OFFLINE in reply.fail_cause
        if is_off and has_seen_engine:
            raise SwarmServerOfflineError(reply.fail_cause)
        has_seen_engine = has_seen_engine or not is_off
        yield from backoff.pause(reply.fail_cause)


def with_task_id(policy: ThrottlePolicy | None, task: Task) -> ThrottlePolicy | None:
    """Return a copy of `policy` with the task's id. If `policy` is None or already has a task id,
    return `policy` unchanged. A throttle policy limits the share of one kind of tasks in a
    batch."""
    if policy is None or policy.current_task_id:
        return policy
    return policy.model_copy(update={"current_task_id": task.task_id})


def end(
    client_uuid: str,
    task: Task,
    episode_uuid: str,
    output: WorkflowOutput,
    declare_client_active: bool = True,
) -> ServerCall[None]:
    """End the episode, and return after the server has stored the output on disk.

    After transient errors the same request is sent again, for at most END_RETRY_S seconds. Raises
    ValueError for an output that cannot be trained, such as an infinite reward. Raises EpisodeLost
    if the episode is no longer claimed by this client. Raises SwarmError if the server refuses the
    request for another reason, or if all retries fail.
    """
    check_output(task, output)
    sent_output = output.model_copy(
        update={"metadata": output.metadata | {"task_id": task.task_id}}
    )
    request = validated(
        EndEpisodeRequest,
        client_uuid=client_uuid,
        episode_uuid=episode_uuid,
        task_id=task.task_id,
        workflow_output=sent_output,
        declare_client_active=declare_client_active,
    )
    call = ServerRequest("/end_episode", request.model_dump())
    try:
        reply = yield from fetch_with_retries(call, EndEpisodeReply, Backoff(END_RETRY_S))
        if reply.warning:
            text = f"episode {episode_uuid} of task {task.task_id}: {reply.warning}"
            yield ThrottledWarning(reply.warning, text)
    except SwarmError as error:
        if error.status in _LOST_STATUSES:
            raise EpisodeLost(error.detail, error.status) from None
        raise


def check_output(task: Task, output: WorkflowOutput) -> None:
    """Raise ValueError if the server would refuse this output of an episode. This is so if the task
    has no id, or if the reward is not one finite number in the allowed range."""
    if not task.task_id:
        raise ValueError(
            "task.task_id is empty: it tells which episodes are compared with each other."
        )
    reward = output.reward
    if not isinstance(reward, int | float) or not abs(reward) <= MAX_REWARD:
        raise ValueError(
            f"WorkflowOutput.reward must be one finite number, at most {MAX_REWARD:g} either way, "
            f"got {reward!r}; use abort_episode() for an episode without a reward."
        )


def abort(
    client_uuid: str, episode_uuid: str, declare_client_active: bool = True
) -> ServerCall[None]:
    """Abort the episode, so that it is not trained. Transient errors are retried. Raises SwarmError
    if the server does not accept the abort. If the abort fails, the server aborts the episode
    itself when the claim expires."""
    request = _abort_request(client_uuid, episode_uuid, declare_client_active, QUICK_TIMEOUT_S)
    yield from fetch_with_retries(request, SuccessReply, Backoff(ABORT_RETRY_S))


def abort_once(client_uuid: str, episode_uuid: str, timeout_s: float) -> ServerCall[None]:
    """Abort the episode without retries. Raises SwarmError if the server does not accept the
    abort."""
    yield from fetch(_abort_request(client_uuid, episode_uuid, False, timeout_s), SuccessReply)


def can_continue(client_uuid: str, episode_uuid: str) -> ServerCall[bool]:
    """Return True if the episode is still claimed by this client. Raises SwarmError if the server
    does not answer or refuses the request."""
    request = _episode_request(client_uuid, episode_uuid, "/can_continue_episode")
    reply = yield from fetch(request, _CanContinueReply)
    return reply.can_continue


def renew(client_uuid: str, episode_uuid: str) -> ServerCall[None]:
    """Ask the server to count the episode's idle time from 0 again.

    The server takes back an episode that is idle for too long. To keep an episode during a long
    time without LLM calls, send this request from time to time.

    Raises EpisodeLost if this client no longer has the claim of the episode. Raises SwarmError
    after any other error.
    """
    try:
        request = _episode_request(client_uuid, episode_uuid, "/renew_episode")
        yield from fetch_with_retries(request, SuccessReply, Backoff(RENEW_RETRY_S))
    except SwarmError as error:
        if error.status in _LOST_STATUSES:
            raise EpisodeLost(error.detail, error.status) from None
        raise


def _abort_request(
    client_uuid: str, episode_uuid: str, is_active: bool, timeout_s: float
) -> ServerRequest:
    request = EndEpisodeRequest(
        client_uuid=client_uuid,
        episode_uuid=episode_uuid,
        workflow_output=WorkflowOutput(reward=0.0),
        declare_client_active=is_active,
    )
    return ServerRequest("/abort_episode", request.model_dump(), timeout_s)


def _episode_request(client_uuid: str, episode_uuid: str, path: str) -> ServerRequest:
    request = CanContinueRequest(client_uuid=client_uuid, episode_uuid=episode_uuid)
    return ServerRequest(path, request.model_dump(), QUICK_TIMEOUT_S)
