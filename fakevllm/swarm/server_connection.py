"""The proxy's connection to its swarm server. This module polls the status, starts the engine, and
sends the rewards of groups. It also copies the server's run log into the proxy's ledger."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, TypeVar

import aiohttp
from pydantic import BaseModel, ValidationError

from fakevllm.errors import LedgerError
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.error_cause import one_line
from fakevllm.swarm.errors import (
    CALL_TIMEOUT_S,
    NEEDS_ADMIN_KEY,
    NETWORK_ERRORS,
    VERSIONS_NEED_ADMIN_KEY,
    describe_error,
    is_transient,
)
from fakevllm.swarm.load_probe import LoadProbe
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings, usable_part
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
    EngineStatus,
    EngineStatusReply,
    LoadPolicyReply,
    LoadPolicyRequest,
    LogEntry,
    LogReply,
    SuccessReply,
    SyncTrainConfigRequest,
)
from fakevllm_adapters.protocol.weights import WeightsReply

log = logging.getLogger("fakevllm.link")
M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")

POLL_EVERY_S = 0.2
"""Seconds between two status requests. The interval is short, because `fakevllm replay` adapts the
rate of its requests to the status. A status request is cheap: the server answers from memory."""
LOAD_TIMEOUT_S = 600.0
"""Timeout in seconds of the request to load a version of the weights. Loading takes long, because
the server starts a process that reads the version's checkpoint."""
RELEASE_TIMEOUT_S = 90.0
"""Timeout in seconds of a request that sends a decision, such as the release of a version. Before
the server replies, it waits for the end of the training step, and may save or restore a checkpoint.
After 60 seconds, the server replies that the decision still waits."""
LOG_EVERY_S = 1.0
"""Seconds between two requests for the run log while the status stays the same. If the status has
changed, the run log is requested at once. Nearly every new entry of the log changes the status."""
END_GROUP_RETRY_S = 60
"""Seconds for which the proxy tries again to send the rewards of a group if the server does not
answer. A restart of the server takes much less time."""
FIRST_RETRY_PAUSE_S = 0.1
MAX_RETRY_PAUSE_S = 2.0
PASSING_STATUSES = (429, 502, 503, 504)
"""HTTP statuses with which the server reports that it cannot start its engine at the moment, but
may be able to start it later."""
FIRST_START_PAUSE_S = 1.0
MAX_START_PAUSE_S = 10.0
_UNCOMPARED_KEYS = frozenset({"num_repeat", "temperature", "privacy"})
"""Settings of the job that may differ from the settings of the server's job. The proxy takes the
first two from its own job when it samples siblings. `privacy` is checked with each status."""


class TokenizeReply(BaseModel):
    """The part of vLLM's reply to `/tokenize` that is used here."""

    tokens: list[int]
    max_model_len: int | None = None


class StartBackoff:
    """Exponential backoff between attempts to start the engine, for a server that cannot start its
    engine at the moment.

    >>> backoff = StartBackoff()
    >>> backoff.failed(100.0)
    >>> backoff.is_due(100.9), backoff.is_due(101.0)
    (False, True)
    """

    def __init__(self) -> None:
        self._pause_s = FIRST_START_PAUSE_S
        self._due_at: float | None = None

    def is_due(self, now: float) -> bool:
        """Return True if the next attempt to start the engine may be made at the time `now`."""
        return self._due_at is None or now >= self._due_at

    def failed(self, now: float) -> None:
        """Record that an attempt to start the engine failed at the time `now`. The pause before the
        next attempt is twice as long as the previous pause, up to a maximum."""
        self._due_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_START_PAUSE_S)


class SwarmLink:
    """Client of one swarm server, with the server's latest known status. Call `close()` after the
    last use."""

    def __init__(
        self,
        url: str,
        key: str | None,
        job: TrainJob,
        ledger: Ledger,
        load_probe: LoadProbe | None = None,
        redaction: RedactionInUse | None = None,
    ) -> None:
        self._redaction = redaction
        self._privacy: dict[str, Any] = {}
        """The server's settings for redaction, as the server has sent them last."""
        self._server_privacy = PrivacySettings()
        """The part of `_privacy` that this proxy can use."""
        self._is_uncovered_logged = False
        self._http = aiohttp.ClientSession(
            url,
            headers=bearer_header(key) | {CLIENT_HEADER: "1"},
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=30),
        )
        self._job = job
        self._ledger = ledger
        self._started_server_id: str | None = None
        """Id of the server process whose engine this link has started or found running. The id
        changes when the server restarts."""
        self._reported_differences: list[str] = []
        """The last logged differences between the engine's job and the proxy's job."""
        self._job_refusal: str | None = None
        """Reason why the server did not accept the proxy's job; None if the job was accepted."""
        self._start_backoff = StartBackoff()
        self._url = url
        self._reported_error: str | None = "not polled yet"
        """Type of the error that was logged last; None while the server answers."""
        self._cursor: tuple[str, int] | None = None
        """Id of the run, and sequence number of the last log entry that was copied into the ledger;
        None if unknown."""
        self._releases_run_id: str | None = None
        """Id of the run whose history of releases was read last; None if no history was read."""
        self._log_fetched_at = -LOG_EVERY_S
        self._is_ledger_error_logged = False
        self.reached = asyncio.Event()
        """Event that is set while the server answers."""
        self.serving = asyncio.Event()
        """Event that is set while an engine is known to be ready."""
        self._status: EngineStatusReply | None = None
        self.load_probe = load_probe or LoadProbe()
        self.is_silent = False
        """Whether the last status request got no response at all. An error or a malformed status is
        also a response, so the value is then False."""
        self.last_answered_s = -math.inf
        """Monotonic time at which the last status request that got an answer was sent. The server
        was running after this time."""

    @property
    def status(self) -> EngineStatusReply | None:
        """Latest status of the server; None while polling fails. If the engine is off because the
        server refused the proxy's training job, the field `engine_status_detail` contains the
        reason."""
        return self._status

    @status.setter
    def status(self, status: EngineStatusReply | None) -> None:
        if status is not None:
            is_off = status.engine_status is EngineStatus.OFFLINE
            detail = status.engine_status_detail or (self._job_refusal if is_off else None)
            lockstep = status.lockstep and self._job.lockstep
            self._use_privacy(status.privacy)
            status = status.model_copy(
                update={"engine_status_detail": detail, "lockstep": lockstep}
            )
        self._status = status
        self._log_uncovered()
        (self.serving.set if self.is_serving else self.serving.clear)()

    def _use_privacy(self, privacy: dict[str, Any]) -> None:
        """Apply the server's redaction settings, in addition to this proxy's own settings."""
        if privacy == self._privacy:
            return
        self._privacy = privacy
        is_complete = True
        try:
            self._server_privacy = PrivacySettings.model_validate(privacy)
        except ValidationError as error:
            problem = one_line(str(error.errors(include_url=False)[0]["msg"]))
            self._server_privacy, is_complete = usable_part(privacy), False
            log.error(
                "%s redacts with settings that this proxy cannot use (%s): requests are answered, "
                "and nothing of them is stored or trained, until the proxy has been mended and "
                "restarted",
                self._url,
                problem.removeprefix("Value error, "),
            )
        if self._redaction is not None:
            self._redaction.set_other(self._server_privacy, is_complete=is_complete)

    @property
    def server_redacts(self) -> bool:
        """Whether the server redacts everything that this proxy's own settings redact. The value is
        False while the server's settings are unknown. It is True if this proxy redacts nothing."""
        own = self._job.privacy_or_default
        if not own.redacts:
            return True
        return self._status is not None and self._server_privacy.covers(own)

    @property
    def _has_job(self) -> bool:
        """Whether the engine is on, according to the latest status. The server then has a training
        job."""
        status = self._status
        return status is not None and status.engine_status is not EngineStatus.OFFLINE

    async def until_server_redacts(self, limit_s: float) -> None:
        """Wait until the server redacts everything that this proxy redacts, but at most `limit_s`
        seconds. Stop waiting if the engine is on, because the server then has another job, with
        other redaction settings."""
        end_s = time.monotonic() + limit_s
        while not (self.server_redacts or self._has_job) and time.monotonic() < end_s:
            await asyncio.sleep(POLL_EVERY_S / 4)

    def _log_uncovered(self) -> None:
        """Log an error if an engine is running and the server redacts too little. The error is
        logged once for each period in which the server redacts too little."""
        if self.server_redacts:
            self._is_uncovered_logged = False
        if self.server_redacts or not self._has_job or self._is_uncovered_logged:
            return
        self._is_uncovered_logged = True
        log.error(
            "%s does not redact all that [privacy] redacts, because its engine runs with another "
            "job: requests are answered and not trained (server_does_not_redact); stop "
            "`fakevllm-server start` and this proxy, and start both again",
            self._url,
        )

    @property
    def model(self) -> str | None:
        """Name of the served model; None while the name is unknown."""
        return self._status.model if self._status is not None else None

    @property
    def dropped(self) -> dict[str, int]:
        """Number of groups that the server's current run has dropped, by the reason. A dropped
        group is not trained."""
        return self.status.dropped if self.status is not None else {}

    @property
    def server_shares_calls(self) -> bool:
        """Whether one call to the server may sample several siblings. The value is False for an
        older server, and while the server's status is unknown."""
        return self.status is not None and self.status.shares_calls

    @property
    def engine(self) -> EngineInfo:
        """The model, context length and version that the engine reports. A field is None while it
        is unknown."""
        status = self._status
        if status is None:
            return EngineInfo()
        return EngineInfo(status.model, status.max_model_len, status.engine_version)

    @property
    def is_serving(self) -> bool:
        """Whether the engine is ready, according to the latest status."""
        return self._status is not None and self._status.engine_status not in (
            EngineStatus.OFFLINE,
            EngineStatus.BOOTING,
        )

    @property
    def may_become_ready(self) -> bool:
        """Whether an engine that is not ready may become ready without a new start by a user. The
        value is False if the engine was stopped or could not be started."""
        status = self.status
        is_off = status is not None and status.engine_status is EngineStatus.OFFLINE
        return not is_off or status is None or status.server_id != self._started_server_id

    async def until_serving(self, limit_s: float) -> None:
        """Wait until the engine becomes ready, but at most `limit_s` seconds. The caller sends a
        failed request again after this wait. If the engine is ready already according to the latest
        status, wait for the full `limit_s` seconds. The request failed although the engine seemed
        to be ready, so an immediate retry would not help."""
        if self.is_serving:
            return await asyncio.sleep(limit_s)
        with contextlib.suppress(TimeoutError):
            # Up to Python 3.11, wait_for may lose a cancellation that comes with the event.
            async with asyncio.timeout(limit_s):
                await self.serving.wait()

    async def run(self) -> None:
        """Poll the server until this task is cancelled. When polls begin to fail, log the error
        once. When the server answers again, log this once as well."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_load())
            await self._follow_server()

    async def _follow_server(self) -> None:
        while True:
            try:
                await self._follow()
                self.reached.set()
                self._log_change(None)
            except Exception as error:  # isolates: another program on the port may answer anything
                self.status = None
                self.reached.clear()
                self._log_change(error)
            await asyncio.sleep(POLL_EVERY_S)

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

    async def close(self) -> None:
        await self._http.close()

    async def _follow(self) -> None:
        """Poll the server once. Update the status, and copy new entries of the run log into the
        ledger. If the engine is off, start it, but only once for each server process."""
        before, was_serving = self.status, self.is_serving
        self.status = status = await self._poll_status()
        is_new_run = before is not None and before.run_id != status.run_id
        if status.engine_status_detail and _state_and_detail(status) != _state_and_detail(before):
            log.warning("%s: %s", *_state_and_detail(status))
        if status.engine_status is EngineStatus.OFFLINE:
            # The engine is started once per server process. An engine that was stopped later was
            # stopped on purpose.
            is_new = status.server_id != self._started_server_id
            if is_new and self._start_backoff.is_due(time.monotonic()):
                is_final = await self._start()
                # No await between these two assignments: OFFLINE together with a known server id
                # means a stopped engine, for which no request waits.
                self.status = await self._poll_status()
                if is_final:
                    self._started_server_id = status.server_id
                if is_final and self.status.engine_status is not EngineStatus.OFFLINE:
                    # Another client may have sent its job, or started the engine, meanwhile.
                    await self._attach(status.server_id)
        elif (
            status.server_id != self._started_server_id
            or (self.is_serving and not was_serving)  # perhaps restarted by another client
            or is_new_run
        ):
            await self._attach(status.server_id)
        now_s = time.monotonic()
        is_changed = before is None or _without_counts(self.status) != _without_counts(before)
        if is_changed or self._cursor is None or now_s - self._log_fetched_at >= LOG_EVERY_S:
            await self._fetch_log(status.run_id)
            self._log_fetched_at = now_s

    async def _poll_status(self) -> EngineStatusReply:
        """Request the status and return it. Set `is_silent` to True if the server sent no response
        at all, and to False otherwise."""
        sent_at_s = time.monotonic()
        try:
            status = await self._get("/get_engine_status", EngineStatusReply)
        except Exception as error:
            self.is_silent = isinstance(error, aiohttp.ClientConnectionError | TimeoutError)
            raise
        self.is_silent, self.last_answered_s = False, sent_at_s
        return status

    async def _follow_load(self) -> None:
        """Probe the engine's queue until this task is cancelled. The probe has a task of its own,
        because a slow engine must not delay the polling of the server."""
        while True:
            await self.load_probe.follow(self._http, is_serving=self.is_serving)
            await self.until_serving(POLL_EVERY_S)

    async def _start(self) -> bool:
        """Send the proxy's training job to the server and start the engine. If the server refuses,
        log the reason and store it in `_job_refusal`.

        Return False if the server cannot start the engine now but may start it later, for example
        because its disk is full. Return True in all other cases, also after a refusal.
        """
        before, self._job_refusal = self._job_refusal, None
        config = SyncTrainConfigRequest(yaml_as_string=self._job.as_yaml())
        for path, request in (("/sync_train_config", config), ("/start_engine", None)):
            async with self._http.post(
                path, json=request.model_dump() if request else {}
            ) as response:
                reply: dict[str, Any] = await response.json()
            if not reply.get("success"):
                self._job_refusal = one_line(str(reply.get("error") or reply.get("detail")))
                if response.status in PASSING_STATUSES:
                    self._start_backoff.failed(time.monotonic())
                    if self._job_refusal != before:
                        log.warning("%s%s: %s; retrying", self._url, path, self._job_refusal)
                    return False
                if response.status == 403:
                    self._job_refusal = f"{NEEDS_ADMIN_KEY} ({self._job_refusal})"
                log.error("%s%s: %s", self._url, path, self._job_refusal)
                break
            for warning in reply.get("warnings") or ():
                log.warning("[job]: %s", one_line(str(warning)))
        self._start_backoff = StartBackoff()
        return True

    async def _attach(self, server_id: str) -> None:
        """Use an engine that is running already. The engine keeps the job with which it was
        started. Settings in which this job differs from the proxy's job are logged once."""
        self._started_server_id = server_id
        async with self._http.get("/get_train_config") as response:
            running: dict[str, Any] | None = await response.json()
        wanted = self._job.model_dump(mode="json")
        differing = [
            f"{key} = {value}, not {wanted.get(key)}"
            for key, value in (running or {}).items()
            if wanted.get(key) != value and key not in _UNCOMPARED_KEYS
        ]
        is_reported = differing == self._reported_differences
        self._reported_differences = differing
        if differing and not is_reported:
            log.warning(
                "the engine is already running with another job: %s; to apply [job], stop "
                "`fakevllm-server start` and this proxy, and start both again",
                "; ".join(differing),
            )

    async def _fetch_log(self, run_id: str) -> None:
        try:
            cursor = await self._cursor_of(run_id)
        except LedgerError as error:  # isolates: apps are served, although nothing is recorded
            if not self._is_ledger_error_logged:
                log.error("the run log is not copied: %s", error)
            self._is_ledger_error_logged = True
            return
        async with self._http.get("/get_run_log", params={"after": cursor}) as response:
            entries = LogReply.model_validate_json(await response.read()).entries
        if entries:
            # The cursor is read from the ledger again, so that entries that could not be written
            # are requested again.
            self._cursor = None
            self._ledger.apply_log(run_id, entries)
            await self._ledger.flush()

    async def _cursor_of(self, run_id: str) -> int:
        """Return the number of the newest entry of the run's log that the ledger already has."""
        if self._cursor is None or self._cursor[0] != run_id:
            self._cursor = (run_id, await asyncio.to_thread(self._ledger.log_cursor, run_id))
        return self._cursor[1]

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

    def _log_change(self, error: Exception | None) -> None:
        """Log an error if its type differs from the type of the last logged error. If `error` is
        None, log once that the server answers again."""
        kind = None if error is None else type(error).__name__
        if kind == self._reported_error:
            return
        self._reported_error = kind
        if error is None:
            log.info("swarm server %s reached", self._url)
        else:
            log.warning("swarm server %s %s; retrying", self._url, describe_error(error))


def _without_counts(status: EngineStatusReply) -> EngineStatusReply:
    """Return a copy of a status without the numbers that change whenever a group arrives. If two
    such copies are equal, the run log has no new entry, and need not be read."""
    return status.model_copy(update={"backlog": 0.0, "waiting": {}})


def _state_and_detail(status: EngineStatusReply | None) -> tuple[str | None, str | None]:
    return (None, None) if status is None else (status.engine_status, status.engine_status_detail)


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
