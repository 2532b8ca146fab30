"""The proxy's connection to its swarm server. This module polls the status, starts the engine, and
copies the server's run log into the proxy's ledger."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from typing import Any

import aiohttp
from pydantic import ValidationError

from fakevllm.errors import LedgerError
from fakevllm.ledger.store import Ledger
from fakevllm.runtime.error_cause import one_line
from fakevllm.swarm.errors import NEEDS_ADMIN_KEY, describe_error
from fakevllm.swarm.load_probe import LoadProbe
from fakevllm.swarm.server_client import ServerClient
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.privacy.settings import PrivacySettings, usable_part
from fakevllm_adapters.protocol.swarm import (
    EngineStatus,
    EngineStatusReply,
    LogReply,
    SyncTrainConfigRequest,
)

log = logging.getLogger("fakevllm.link")

POLL_EVERY_S = 0.2
"""Seconds between two status requests. The interval is short, because `fakevllm replay` adapts the
rate of its requests to the status. A status request is cheap: the server answers from memory."""
LOG_EVERY_S = 1.0
"""Seconds between two requests for the run log while the status stays the same. If the status has
changed, the run log is requested at once. Nearly every new entry of the log changes the status."""
PASSING_STATUSES = (429, 502, 503, 504)
"""HTTP statuses with which the server reports that it cannot start its engine at the moment, but
may be able to start it later."""
FIRST_START_PAUSE_S = 1.0
MAX_START_PAUSE_S = 10.0
_UNCOMPARED_KEYS = frozenset({"num_repeat", "temperature", "privacy"})
"""Settings of the job that may differ from the settings of the server's job. The proxy takes the
first two from its own job when it samples siblings. `privacy` is checked with each status."""


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


class SwarmLink(ServerClient):
    """Connection to one swarm server, which sends requests and knows the server's latest status.
    Call `close()` after the last use."""

    def __init__(
        self,
        url: str,
        key: str | None,
        job: TrainJob,
        ledger: Ledger,
        load_probe: LoadProbe | None = None,
        redaction: RedactionInUse | None = None,
    ) -> None:
        super().__init__(url, key)
        self._url = url
        self._redaction = redaction
        self._privacy: dict[str, Any] = {}
        """The server's settings for redaction, as the server has sent them last."""
        self._server_privacy = PrivacySettings()
        """The part of `_privacy` that this proxy can use."""
        self._is_uncovered_logged = False
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
        self._reported_error: str | None = "not polled yet"
        """Type of the error that was logged last; None while the server answers."""
        self._cursor: tuple[str, int] | None = None
        """Id of the run, and sequence number of the last log entry that was copied into the ledger;
        None if unknown."""
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
