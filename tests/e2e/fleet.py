"""A server with several rollout replicas, the processes of these replicas, and many clients that
sample groups while versions are published."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import (
    CLIENT_HEADER,
    PROXY_HEADERS,
    SESSION_HEADER,
    SIBLING_HEADER,
    EndGroupReply,
    EngineStatusReply,
)
from tests.e2e.processes import Process, wait_until

TIMEOUT_S = 60.0
NUM_SHARED = 3
"""Number of siblings that share a call, as those of a proxy do."""
START_TIMEOUT_S = 120.0


class Fleet:
    """The server's process as a client sees it. The connections are closed at the end of a `with`
    block."""

    def __init__(self, server: Process) -> None:
        self.server = server
        self.model = ""
        self._http = httpx.Client(base_url=server.url, timeout=TIMEOUT_S)

    def start(self, job: TrainJob, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the engines with a job, and wait until they answer."""
        job_text = {"yaml_as_string": job.as_yaml()}
        assert self._http.post("/sync_train_config", json=job_text).json()["success"]
        assert self._http.post("/start_engine").json()["success"]
        self.wait(lambda status: status.engine_status == "ENGINE.ROLLING", timeout_s)
        self.model = self.status().model or ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def status(self) -> EngineStatusReply:
        reply = self._http.get("/get_engine_status", headers={CLIENT_HEADER: "1"})
        return EngineStatusReply.model_validate(reply.json())

    def wait(
        self, condition: Callable[[EngineStatusReply], bool], timeout_s: float = TIMEOUT_S
    ) -> None:
        """Wait until the condition holds for the server's status."""
        wait_until(lambda: condition(self.status()), timeout_s, lambda: f"{self.status()}")

    def states(self) -> dict[str, str]:
        return {replica.name: replica.state for replica in self.status().replicas}

    def metrics(self) -> str:
        return self._http.get("/metrics").text

    def wait_for_metrics(self, *lines: str) -> str:
        """Wait until the page of metrics has all lines, and return it. The groups that clients have
        left may publish further versions, and then a replica serves a moment later."""
        page = ""

        def complete() -> bool:
            nonlocal page
            page = self.metrics()
            return all(line in page.splitlines() for line in lines)

        wait_until(complete, TIMEOUT_S, lambda: f"{lines} in\n{page}")
        return page

    def pid(self, replica: str) -> int:
        """Return the id of the process that is the replica's engine. Of vLLM's processes, this is
        the one that answers HTTP, and not its supervisor."""
        log = self.server.folder / replica / "engine.log"
        found = [pid for pid in map(int, _pids()) if _is_engine(pid, log)]
        assert found, f"{replica} has no process"
        return min(found)

    def signal(self, replica: str, number: signal.Signals) -> None:
        os.kill(self.pid(replica), number)


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """What the server's reply says about the calls of one group."""

    name: str
    versions: frozenset[int]
    """The versions that sampled the siblings from 1 on."""
    lead_replica: str | None
    other_replicas: frozenset[str | None]
    """The replicas that sampled the siblings from 1 on."""
    is_shared: bool
    """Whether the siblings from 1 on shared a call."""

    @property
    def replicas(self) -> frozenset[str | None]:
        return self.other_replicas | {self.lead_replica}


@dataclass(slots=True)
class Crowd:
    """Clients that sample groups one after the other, and end them with rewards."""

    fleet: Fleet
    max_tokens: int = 8
    groups: list[SampledGroup] = field(default_factory=list[SampledGroup])
    errors: list[str] = field(default_factory=list[str])
    is_stopping: bool = False
    _with_own_calls: set[str] = field(default_factory=set[str])
    """Groups whose siblings had a call each, because the engine refused a shared one."""

    async def run(self, num_clients: int) -> None:
        """Run the clients until `is_stopping` is set."""
        limits = httpx.Limits(max_connections=None)
        url, headers = self.fleet.server.url, dict(PROXY_HEADERS)
        async with httpx.AsyncClient(
            base_url=url, headers=headers, timeout=TIMEOUT_S, limits=limits
        ) as http:
            await asyncio.gather(*(self._client(http, number) for number in range(num_clients)))

    async def _client(self, http: httpx.AsyncClient, number: int) -> None:
        turn = 0
        while not self.is_stopping:
            turn += 1
            await self._group(http, f"client-{number}", f"client-{number}-turn-{turn}")

    async def _group(self, http: httpx.AsyncClient, session: str, group: str) -> None:
        lead, others = self._call(http, session, f"{group}/0", 1), f"{group}/1-{NUM_SHARED}"
        is_good = all(await asyncio.gather(lead, self._call(http, session, others, NUM_SHARED)))
        if not is_good:
            return
        rewards = [1.0, *[0.0] * NUM_SHARED]
        reply = (await http.post("/end_group", json={"group_id": group, "rewards": rewards})).json()
        lead_calls, *other_calls = EndGroupReply.model_validate(reply).calls
        calls = [call for own in other_calls for call in own]
        self.groups.append(
            SampledGroup(
                group,
                frozenset(span[0] for call in calls for span in call.weight_versions),
                lead_calls[0].replica,
                frozenset(call.replica for call in calls),
                is_shared=group not in self._with_own_calls,
            )
        )

    async def _call(self, http: httpx.AsyncClient, session: str, sibling: str, num: int) -> bool:
        body: dict[str, Any] = {
            "model": self.fleet.model,
            "messages": [{"role": "user", "content": f"hello from {session}"}],
            "max_tokens": self.max_tokens,
        }
        if num > 1:
            body["n"] = num
        headers = {SESSION_HEADER: session, SIBLING_HEADER: sibling}
        try:
            response = await http.post("/v1/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as error:
            self.errors.append(f"{sibling}: {error!r}")
            return False
        if num > 1 and _needs_own_calls(response):
            # As a proxy does: vLLM's new engine has not shown yet how it answers one choice.
            group = sibling.partition("/")[0]
            self._with_own_calls.add(group)
            own = (self._call(http, session, f"{group}/{1 + index}", 1) for index in range(num))
            return all(await asyncio.gather(*own))
        if response.status_code != 200:
            self.errors.append(f"{sibling}: {response.status_code} {response.text[:200]}")
        return response.status_code == 200


def _needs_own_calls(response: httpx.Response) -> bool:
    return response.status_code == 400 and response.json()["error"]["param"] == "n"


def _pids() -> list[str]:
    return [folder.name for folder in Path("/proc").glob("[0-9]*")]


def _is_engine(pid: int, log: Path) -> bool:
    """Return True if the process writes to the log file, and is not vLLM's supervisor."""
    process = Path(f"/proc/{pid}")
    try:
        is_supervisor = b"process_supervisor" in (process / "cmdline").read_bytes()
        return os.readlink(process / "fd/1") == str(log) and not is_supervisor
    except OSError:  # it has ended, or belongs to another user
        return False
