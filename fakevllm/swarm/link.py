"""The proxy's line to its swarm server: follows its status, starts its engine, ends groups, brings
home its log."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel
from tenacity import retry, retry_if_exception, stop_after_delay, wait_random_exponential

from fakevllm.ledger.store import Ledger
from fakevllm.swarm.errors import (
    CALL_TIMEOUT_S,
    NEEDS_ADMIN_KEY,
    NETWORK_ERRORS,
    describe_error,
    is_transient,
    one_line,
)
from fakevllm.swarm.load_probe import LoadProbe
from fakevllm_adapters.formats.base import EngineInfo
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.keys import bearer_header
from fakevllm_adapters.protocol.swarm import (
    AbortGroupRequest,
    AddSampleRequest,
    EndGroupReply,
    EndGroupRequest,
    EngineStatus,
    EngineStatusReply,
    LogReply,
    SuccessReply,
    SyncTrainConfigRequest,
)

log = logging.getLogger("fakevllm.link")
M = TypeVar("M", bound=BaseModel)

POLL_EVERY_S = 0.2
"""The server answers from memory; replays keep their pace by what is heard."""
END_GROUP_RETRY_S = 60
"""How long an end is sent again to a server that does not answer; a server restarts well within
it."""
_PROXY_KEYS = frozenset({"num_repeat", "temperature"})
"""Ours hold for our siblings whatever the server's job says."""


class SwarmLink:
    def __init__(
        self,
        url: str,
        key: str | None,
        job: TrainJob,
        ledger: Ledger,
        load_probe: LoadProbe | None = None,
    ) -> None:
        self._http = aiohttp.ClientSession(
            url,
            headers=bearer_header(key),
            timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
            connector=aiohttp.TCPConnector(limit=64, keepalive_timeout=30),
        )
        self._job = job
        self._ledger = ledger
        self._started_server_id: str | None = None
        self._job_refusal: str | None = None
        """Why the server did not take our job."""
        self._url = url
        self._reported_error: str | None = "nothing heard yet"
        """As last reported; None while there is none."""
        self._cursor: tuple[str, int] | None = None
        """(run id, number of its last applied log entry) where known."""
        self.reached = asyncio.Event()
        """Set while the server answers."""
        self.serving = asyncio.Event()
        """Set while an engine is known to serve."""
        self._status: EngineStatusReply | None = None
        self.load_probe = load_probe or LoadProbe()
        self.is_silent = False
        """Whether its last status did not come at all. A server that refuses to tell it, or tells
        nonsense, lives, and so does one whose log cannot be had."""

    @property
    def status(self) -> EngineStatusReply | None:
        """As last heard, with why our job was not taken; None while the server cannot be
        reached."""
        return self._status

    @status.setter
    def status(self, status: EngineStatusReply | None) -> None:
        if status is not None:
            is_off = status.engine_status is EngineStatus.OFFLINE
            told = status.engine_status_detail or (self._job_refusal if is_off else None)
            both = status.lockstep and self._job.lockstep
            status = status.model_copy(update={"engine_status_detail": told, "lockstep": both})
        self._status = status
        (self.serving.set if self.is_serving else self.serving.clear)()

    @property
    def model(self) -> str | None:
        return self.status.model if self.status is not None else None

    @property
    def dropped(self) -> dict[str, int]:
        """By the server's run, as last heard."""
        return self.status.dropped if self.status is not None else {}

    @property
    def engine(self) -> EngineInfo:
        """What is known of the engine that answers."""
        status = self.status
        if status is None:
            return EngineInfo()
        return EngineInfo(status.model, status.max_model_len, status.engine_version)

    @property
    def is_serving(self) -> bool:
        return self.status is not None and self.status.engine_status not in (
            EngineStatus.OFFLINE,
            EngineStatus.BOOTING,
        )

    @property
    def may_become_ready(self) -> bool:
        """Whether an engine that does not answer may yet: not one that was stopped, or that could
        not be started."""
        status = self.status
        is_off = status is not None and status.engine_status is EngineStatus.OFFLINE
        return not is_off or status is None or status.server_id != self._started_server_id

    async def until_serving(self, limit_s: float) -> None:
        """Returns when an engine begins to answer, or after `limit_s`; where one is thought to
        answer already, after all of it."""
        if self.is_serving:
            return await asyncio.sleep(limit_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):  # wait_for may lose a cancellation, up to 3.11
                await self.serving.wait()

    async def run(self) -> None:
        """Until cancelled. Trouble with the server is reported once, and over when it is over."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_load())
            await self._follow_server()

    async def _follow_server(self) -> None:
        while True:
            try:
                await self._follow()
                self.reached.set()
                self._report(None)
            except Exception as error:  # isolates: a stranger on the port may answer anything
                self.status = None
                self.reached.clear()
                self._report(error)
            await asyncio.sleep(POLL_EVERY_S)

    async def fetch_status(self) -> EngineStatusReply | None:
        """The status at this moment; None where the server does not tell."""
        try:
            return await self._get("/get_engine_status", EngineStatusReply)
        except (*NETWORK_ERRORS, ValueError):
            return None

    async def end_group(self, request: EndGroupRequest) -> EndGroupReply:
        """Sends again what may not have arrived; the server takes a group once. Raises
        aiohttp.ClientError."""
        return await _with_retries(self._post)("/end_group", request, EndGroupReply)

    async def add_sample(self, request: AddSampleRequest) -> EndGroupReply:
        """As `end_group`."""
        return await _with_retries(self._post)("/add_sample", request, EndGroupReply)

    async def abort_group(self, group_id: str) -> None:
        """Best effort: a group that is never ended is dropped by the server in time."""
        try:
            await self._post("/abort_group", AbortGroupRequest(group_id=group_id), SuccessReply)
        except NETWORK_ERRORS as error:
            log.debug("group %s is not aborted: the server %s", group_id, describe_error(error))

    async def close(self) -> None:
        await self._http.close()

    async def _follow(self) -> None:
        before, status = self.status, await self._poll_status()
        self.status = status
        if status.engine_status_detail and _state_and_detail(status) != _state_and_detail(before):
            log.warning("%s: %s", *_state_and_detail(status))
        if status.engine_status is EngineStatus.OFFLINE:
            # started once for each life of the server: somebody who stops the engine means it
            if status.server_id != self._started_server_id:
                await self._start()
                # Together: one that is thought to have been stopped is waited for by nobody.
                self.status = await self._poll_status()
                self._started_server_id = status.server_id
        elif status.server_id != self._started_server_id:
            await self._attach(status.server_id)
        await self._fetch_log(status.run_id)

    async def _poll_status(self) -> EngineStatusReply:
        try:
            status = await self._get("/get_engine_status", EngineStatusReply)
        except Exception as error:
            self.is_silent = isinstance(error, aiohttp.ClientConnectionError | TimeoutError)
            raise
        self.is_silent = False
        return status

    async def _follow_load(self) -> None:
        """Beside the rest: an engine may take long to tell, and the server is heard meanwhile."""
        while True:
            await self.load_probe.follow(self._http, is_serving=self.is_serving)
            await self.until_serving(POLL_EVERY_S)

    async def _start(self) -> None:
        self._job_refusal = None
        config = SyncTrainConfigRequest(yaml_as_string=self._job.as_yaml())
        for path, request in (("/sync_train_config", config), ("/start_engine", None)):
            async with self._http.post(
                path, json=request.model_dump() if request else {}
            ) as answer:
                reply: dict[str, Any] = await answer.json()
            if not reply.get("success"):
                self._job_refusal = one_line(str(reply.get("error") or reply.get("detail")))
                if answer.status == 403:
                    self._job_refusal = f"{NEEDS_ADMIN_KEY} ({self._job_refusal})"
                log.error("%s%s: %s", self._url, path, self._job_refusal)
                break
            for warning in reply.get("warnings") or ():
                log.warning("[job]: %s", one_line(str(warning)))

    async def _attach(self, server_id: str) -> None:
        """A running engine keeps its job; a differing one of ours is reported, not applied."""
        self._started_server_id = server_id
        async with self._http.get("/get_train_config") as answer:
            theirs: dict[str, Any] | None = await answer.json()
        ours = self._job.model_dump(mode="json")
        differing = [
            f"{key} = {value}, not {ours.get(key)}"
            for key, value in (theirs or {}).items()
            if ours.get(key) != value and key not in _PROXY_KEYS
        ]
        if differing:
            log.warning(
                "the engine runs already, with a job of its own: %s; for [job] to count, end "
                "`fakevllm-server start` and this, and start both again",
                "; ".join(differing),
            )

    async def _fetch_log(self, run_id: str) -> None:
        cursor = await self._cursor_of(run_id)
        async with self._http.get("/get_run_log", params={"after": cursor}) as answer:
            entries = LogReply.model_validate_json(await answer.read()).entries
        if entries:
            # Read anew from the file: entries that could not be written are asked for again.
            self._cursor = None
            self._ledger.apply_log(run_id, entries)
            await self._ledger.flush()

    async def _cursor_of(self, run_id: str) -> int:
        if self._cursor is None or self._cursor[0] != run_id:
            self._cursor = (run_id, await asyncio.to_thread(self._ledger.log_cursor, run_id))
        return self._cursor[1]

    async def _get(self, path: str, reply: type[M]) -> M:
        async with self._http.get(path) as answer:
            answer.raise_for_status()
            return reply.model_validate_json(await answer.read())

    async def _post(self, path: str, request: BaseModel, reply: type[M]) -> M:
        body = request.model_dump_json().encode()
        headers = {"Content-Type": "application/json"}
        async with self._http.post(path, data=body, headers=headers) as answer:
            answer.raise_for_status()
            return reply.model_validate_json(await answer.read())

    def _report(self, error: Exception | None) -> None:
        trouble = None if error is None else type(error).__name__
        if trouble == self._reported_error:
            return
        self._reported_error = trouble
        if error is None:
            log.info("swarm server %s reached", self._url)
        else:
            log.warning("swarm server %s %s; trying on", self._url, describe_error(error))


def _state_and_detail(status: EngineStatusReply | None) -> tuple[str | None, str | None]:
    return (None, None) if status is None else (status.engine_status, status.engine_status_detail)


_with_retries = retry(
    retry=retry_if_exception(is_transient),
    stop=stop_after_delay(END_GROUP_RETRY_S),
    wait=wait_random_exponential(multiplier=0.1, max=2),
    reraise=True,
)
