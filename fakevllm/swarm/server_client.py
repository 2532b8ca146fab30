"""The requests that the proxy sends to its swarm server, each with its reply."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import aiohttp
from pydantic import BaseModel

from fakevllm.swarm.errors import (
    CALL_TIMEOUT_S,
    NETWORK_ERRORS,
    VERSIONS_NEED_ADMIN_KEY,
    describe_error,
    is_transient,
)
from fakevllm_adapters.protocol.forgetting import ForgetGroupsReply, ForgetGroupsRequest
from fakevllm_adapters.protocol.keys import bearer_header
from fakevllm_adapters.protocol.releases import (
    ReleaseReply,
    ReleaseRequest,
    ReleasesReply,
    RollbackRequest,
    TrainingLimitRequest,
)
from fakevllm_adapters.protocol.separate_prompts import ASKED, PROMPTS_HEADER, parse_sizes
from fakevllm_adapters.protocol.swarm import (
    CLIENT_HEADER,
    AbortGroupRequest,
    AddDemonstrationRequest,
    AddSampleRequest,
    EndGroupReply,
    EndGroupRequest,
    EngineStatusReply,
    LoadPolicyReply,
    LoadPolicyRequest,
    LogEntry,
    LogReply,
    SuccessReply,
)
from fakevllm_adapters.protocol.weights import WeightsReply

log = logging.getLogger("fakevllm.link")
M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")

LOAD_TIMEOUT_S = 600.0
"""Timeout in seconds of the request to load a version of the weights. Loading takes long, because
the server starts a process that reads the version's checkpoint."""
RELEASE_TIMEOUT_S = 90.0
"""Timeout in seconds of a request that sends a decision, such as the release of a version. Before
the server replies, it waits for the end of the training step, and may save or restore a checkpoint.
After 60 seconds, the server replies that the decision still waits."""
END_GROUP_RETRY_S = 60
"""Seconds for which the proxy tries again to send the rewards of a group if the server does not
answer. A restart of the server takes much less time."""
FIRST_RETRY_PAUSE_S = 0.1
MAX_RETRY_PAUSE_S = 2.0


class TokenizeReply(BaseModel):
    """The part of vLLM's reply to `/tokenize` that is used here."""

    tokens: list[int]
    max_model_len: int | None = None


class ServerClient:
    """Client of one swarm server. Call `close()` after the last use."""

    def __init__(self, url: str, key: str | None) -> None:
        self._http = aiohttp.ClientSession(
            url,
            headers=bearer_header(key) | {CLIENT_HEADER: "1"},
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=30),
        )
        self._releases_run_id: str | None = None
        """Id of the run whose history of releases was read last; None if no history was read."""

    async def close(self) -> None:
        await self._http.close()

    async def fetch_status(self) -> EngineStatusReply | None:
        """Request the server's current status and return it. Return None if the request fails or
        the reply is not a valid status."""
        try:
            return await self._get("/get_engine_status", EngineStatusReply)
        except (*NETWORK_ERRORS, ValueError):
            return None

    async def end_group(self, request: EndGroupRequest) -> EndGroupReply:
        """Send the rewards that end a group, and retry after transient errors. A retry is safe,
        because the server accepts each group only once. Raises one of NETWORK_ERRORS if the last
        attempt fails."""
        return await _with_retries(self._end_group)(request)

    async def add_sample(self, request: AddSampleRequest) -> EndGroupReply:
        """Send a late sample to the server: an answer with feedback that came after the answer's
        group had been sent. Transient errors are retried. Raises one of NETWORK_ERRORS if the last
        attempt fails."""
        return await _with_retries(self._post)("/add_sample", request, EndGroupReply)

    async def tokenize(self, body: dict[str, Any]) -> TokenizeReply:
        """Send a request to the engine's route `/tokenize`. `body` is the body of a vLLM request,
        without the field `model`. Transient errors are not retried. Raises one of NETWORK_ERRORS if
        the request fails. Raises ValueError if the reply is not valid."""
        async with self._http.post("/tokenize", json=body) as response:
            response.raise_for_status()
            return TokenizeReply.model_validate_json(await response.read())

    async def add_demonstration(self, request: AddDemonstrationRequest) -> EndGroupReply:
        """Send a user's edit of an answer to the server. Transient errors are retried. Raises one
        of NETWORK_ERRORS if the last attempt fails."""
        return await _with_retries(self._post)("/add_demonstration", request, EndGroupReply)

    async def abort_group(self, group_id: str) -> None:
        """Ask the server to drop a group. If the request fails, the error is only logged. The
        server drops a group by itself if the group's rewards do not arrive in time."""
        try:
            await self._post("/abort_group", AbortGroupRequest(group_id=group_id), SuccessReply)
        except NETWORK_ERRORS as error:
            log.debug(
                "group %s could not be aborted: the server %s", group_id, describe_error(error)
            )

    async def forget_groups(self, request: ForgetGroupsRequest) -> ForgetGroupsReply:
        """Ask the server to delete the captured calls of groups. Raises one of NETWORK_ERRORS if
        the request fails. Raises ValueError if the reply is not valid."""
        return await self._post(
            "/forget_groups", request, ForgetGroupsReply, timeout_s=RELEASE_TIMEOUT_S
        )

    async def load_policy(self, version: int, *, pinned: bool = False) -> LoadPolicyReply:
        """Ask the server to make a version of the weights available for sampling. Return the
        server's reply, which contains the model name of the version. `pinned` is True if the
        version answers apps, and False if only an evaluation samples the version. If the proxy's
        key is not an admin's, return a reply with `success` False. Raises one of NETWORK_ERRORS if
        the request fails."""
        request, path = LoadPolicyRequest(version=version, pinned=pinned), "/load_policy"
        try:
            return await self._post(path, request, LoadPolicyReply, timeout_s=LOAD_TIMEOUT_S)
        except aiohttp.ClientResponseError as error:  # translated
            if error.status != 403:
                raise
            return LoadPolicyReply(success=False, failure_reason=VERSIONS_NEED_ADMIN_KEY)

    async def unload_policy(self, version: int, *, pinned: bool = False) -> bool:
        """Report to the server that a version is no longer needed. `pinned` is True if the version
        answered apps until now. Return True if the server has unloaded the version.

        If the request fails, log the error and return False. No retry is needed, because the server
        unloads unused versions by itself when it needs room.
        """
        try:
            request = LoadPolicyRequest(version=version, pinned=pinned)
            reply = await self._post("/unload_policy", request, SuccessReply)
        except (*NETWORK_ERRORS, ValueError) as error:
            log.debug("version %d stays loaded: the server %s", version, describe_error(error))
            return False
        return reply.success

    async def releases(self) -> ReleasesReply:
        """Request the history of releases. Raises one of NETWORK_ERRORS if the request fails.
        Raises ValueError if the reply is not valid."""
        reply = await self._get("/releases", ReleasesReply)
        self._releases_run_id = reply.run_id
        return reply

    async def decide(self, request: ReleaseRequest) -> ReleaseReply:
        """Send a decision about a version to the server. A repeated request has no further effect.
        If `request` names no run, the decision is for the run whose history of releases this proxy
        read last. The server refuses the decision if its current run is a different run.

        Raises one of NETWORK_ERRORS if the request fails. Raises ValueError if the reply is not
        valid.
        """
        run_id = request.run_id or self._releases_run_id
        request = request.model_copy(update={"run_id": run_id})
        return await self._post("/release", request, ReleaseReply, timeout_s=RELEASE_TIMEOUT_S)

    async def roll_back(self, request: RollbackRequest) -> ReleaseReply:
        """Ask the server to let training go back to an earlier version. A repeated request has no
        further effect. Raises one of NETWORK_ERRORS if the request fails. Raises ValueError if the
        reply is not valid."""
        return await self._post("/rollback", request, ReleaseReply, timeout_s=RELEASE_TIMEOUT_S)

    async def run_log(self, after: int) -> list[LogEntry]:
        """Request the next entries of the current run's log, whose numbers are above `after`. The
        list is empty if there are no further ones. Raises one of NETWORK_ERRORS if the request
        fails. Raises ValueError if the reply is not valid."""
        return (await self._get(f"/get_run_log?after={after}", LogReply)).entries

    async def limit_training(self, version: int | None) -> SuccessReply:
        """Limit training: `version` is the newest version that training may produce. None removes
        the limit. The limit is for the run whose history of releases this proxy read last. The
        server refuses the request if its current run is a different run.

        Raises one of NETWORK_ERRORS if the request fails, or if the server is too old to limit
        training. Raises ValueError if the reply is not valid.
        """
        request = TrainingLimitRequest(version=version, run_id=self._releases_run_id)
        return await self._post("/training_limit", request, SuccessReply)

    async def fetch_weights(self, version: int) -> WeightsReply:
        """Return the server's data about one version of the weights. The version belongs to the
        server's current run. Raises one of NETWORK_ERRORS if the request fails, or if the server is
        too old for this request."""
        return await self._get(f"/get_weights?version={version}", WeightsReply)

    async def _get(self, path: str, reply: type[M]) -> M:
        async with self._http.get(path) as response:
            response.raise_for_status()
            return reply.model_validate_json(await response.read())

    async def _post(
        self, path: str, request: BaseModel, reply: type[M], timeout_s: float = CALL_TIMEOUT_S
    ) -> M:
        body = request.model_dump_json().encode()
        headers = {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self._http.post(path, data=body, headers=headers, timeout=timeout) as response:
            response.raise_for_status()
            return reply.model_validate_json(await response.read())

    async def _end_group(self, request: EndGroupRequest) -> EndGroupReply:
        """Send the rewards that end a group, and return the reply, which contains the captured
        calls. The request header PROMPTS_HEADER asks the server to send each prompt only once. A
        server of an older version ignores this header, and repeats the prompt in each call."""
        headers = {"Content-Type": "application/json", PROMPTS_HEADER: ASKED}
        body = request.model_dump_json().encode()
        async with self._http.post("/end_group", data=body, headers=headers) as response:
            response.raise_for_status()
            sizes = parse_sizes(response.headers.get(PROMPTS_HEADER))
            return EndGroupReply.from_response(await response.read(), sizes)


def _with_retries(send: Callable[P, Awaitable[M]]) -> Callable[P, Awaitable[M]]:
    """Return a function that calls `send`. After a transient error, this function calls `send`
    again, until END_GROUP_RETRY_S seconds have passed since the first call. The pauses between the
    calls are random. Their upper bound doubles with each pause, up to MAX_RETRY_PAUSE_S."""

    async def send_with_retries(*args: P.args, **named: P.kwargs) -> M:
        last_at, max_pause_s = time.monotonic() + END_GROUP_RETRY_S, FIRST_RETRY_PAUSE_S
        while True:
            try:
                return await send(*args, **named)
            except NETWORK_ERRORS as error:
                if not is_transient(error) or time.monotonic() >= last_at:
                    raise
            await asyncio.sleep(random.uniform(0.0, max_pause_s))
            max_pause_s = min(2 * max_pause_s, MAX_RETRY_PAUSE_S)

    return send_with_retries
