"""Client of an engine that runs in a child process. The engine is a rollout engine, a trainer, or
both.

The child process serves HTTP on one Unix socket. It samples answers for requests to vLLM's routes.
The server that started the process controls the engine by this project's control routes
(`/control/…`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import unpack_floats
from fakevllm_server.backends.process.child_process import STOP_GRACE_S, ChildProcess
from fakevllm_server.types.backend import (
    ActionFailed,
    BackendError,
    BackendRefused,
    Batch,
    Call,
    Endpoint,
    LossSpec,
    PolicyName,
    StepMetrics,
)
from fakevllm_server.types.demonstrations import Demonstration
from fakevllm_server.types.engine_spec import EngineSpec
from fakevllm_server.types.known_prompt import ProbeReply
from fakevllm_server.types.number_arrays import FloatArray, float_array
from fakevllm_server.types.weight_transfer import TransferTarget
from fakevllm_server.types.weight_versions import WeightGate

Json = dict[str, Any]
_Row = Call | Demonstration

log = logging.getLogger("fakevllm.server")

CONTROL_TIMEOUT_S = 3600
"""Timeout of a control action in seconds, which is long enough for one training step of a large
model."""
HEALTH_TIMEOUT_S = 5
HEALTH_INTERVAL_S = 10.0
"""Seconds between two health checks of a running engine."""
HUNG_AFTER_S = 60.0
"""Seconds without a successful health check after which an engine counts as hung. A busy engine
thread does not delay a health check, because the process's event loop answers the check."""
HUNG_AFTER_CHECKS = 3
"""Minimum number of failed health checks in a row before an engine counts as hung. If this server
itself was suspended for a while, only one check fails, namely the check that was running at that
time."""
HUNG_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for a hung engine, which rarely reacts to SIGTERM."""
EXIT_WAIT_S = 2.0
"""Maximum seconds to wait for the exit code of an engine that has broken its connection. The
connections of a process close some time before the process has exited."""
BROKEN_CONNECTION = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)
URL = "http://engine"
JSON_HEADERS = {"Content-Type": "application/json"}

MODULES = {
    "fake": "fakevllm_server.backends.fake.engine",
    "embedded": "fakevllm_server.backends.embedded",
    "verl": "fakevllm_server.backends.verl",
}
"""The module that an engine's process runs, by the name of the engine."""


class ChildEngine:
    """An engine in a child process. The class implements the interfaces Rollout (sampling) and
    Trainer (training). If `spec.train_only` is true, the process only trains."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._process = ChildProcess(f"the {spec.engine} {spec.role}", spec.log_file)
        self._http: aiohttp.ClientSession | None = None
        self._socket: Path | None = None
        self._gate = WeightGate()
        self._closing: asyncio.Future[None] | None = None

    async def launch(self) -> Endpoint:
        await self.close()
        self._socket = self._spec.new_socket()
        await self._process.start(self._command(self._socket), self._spec.environment)
        self._http = aiohttp.ClientSession(
            URL,
            # No keep-alive: the child could close an idle connection just when a step is sent.
            connector=aiohttp.UnixConnector(str(self._socket), force_close=True),
            timeout=aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S),
        )
        await self._process.wait_until_ready(self.health)
        info = await self._call("GET", "info")
        self._gate = WeightGate()
        return Endpoint(
            self._socket,
            URL,
            info["model_name"],
            info["max_model_len"],
            info["default_sampling"],
            reports_allowed=info["reports_allowed"],
            is_bundled=True,
            holds_policies=True,
            gate=self._gate,
        )

    async def boot(self, job: TrainJob) -> None:
        reply = await self._call("POST", "boot", {"job": job.model_dump()})
        if reply.get("told"):
            log.info("%s: %s", self._process.name, reply["told"])

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        body = {"step": batch.step, "version": batch.version, "loss": asdict(loss)}
        rows = {"calls": batch.calls, "demonstrations": batch.demonstrations}
        metrics = await self._call("POST", "step", body, rows)
        return {name: float(value) for name, value in metrics.items()}

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[FloatArray]:
        reply = await self._call("POST", "log_probs", {"policy": policy}, {"calls": calls})
        return await asyncio.to_thread(_unpack_rows, reply["log_probs"])

    async def publish(self, version: int) -> None:
        async with self._gate.drained(self._spec.drain_bound_s):
            with self._gate.swap(version):
                await self._call("POST", "publish", {"version": version})

    async def load_weights(self, folder: Path, version: int) -> None:
        body = {"folder": str(folder), "version": version}
        async with self._gate.drained(self._spec.drain_bound_s):
            with self._gate.swap(version):
                await self._call("POST", "load_weights", body)

    async def load_policy(self, name: str, folder: Path, version: int) -> None:
        body = {"name": name, "folder": str(folder), "version": version}
        await self._call("POST", "load_policy", body)

    async def unload_policy(self, name: str) -> None:
        await self._call("POST", "unload_policy", {"name": name})

    async def policies(self) -> dict[str, int]:
        return await self._call("GET", "policies")

    async def probe(self) -> ProbeReply:
        reply = await self._call("POST", "probe", {})
        log_probs = unpack_floats(reply["log_probs"])
        return ProbeReply(reply["ids"], log_probs, reply["dtype"], reply["num_layers"])

    async def send_weights(self, target: TransferTarget) -> None:
        await self._call("POST", "send_weights", {"target": asdict(target)})

    async def export(self, folder: Path) -> None:
        await self._call("POST", "export", {"folder": str(folder)})

    async def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        await self._call("POST", "export_adapters", {"folder": str(folder), "policy": policy})

    async def save(self, folder: Path) -> None:
        await self._call("POST", "save", {"folder": str(folder)})

    async def restore(self, folder: Path) -> None:
        await self._call("POST", "restore", {"folder": str(folder)})

    async def health(self) -> bool:
        if self._http is None or self._socket is None or not self._socket.exists():
            return False
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        try:
            async with self._http.get("/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def lost(self) -> str:
        """Wait until the engine's process has exited or hangs. If the process hangs, stop it.
        Return a message that says what happened."""
        exited = asyncio.ensure_future(self._process.lost())
        hung = asyncio.ensure_future(self._wait_until_hung())
        try:
            await asyncio.wait({exited, hung}, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return exited.result()
            message = hung.result()
            await self._close_once(HUNG_GRACE_S)
            return message
        finally:
            exited.cancel()
            hung.cancel()
            await asyncio.gather(exited, hung, return_exceptions=True)

    async def close(self) -> None:
        """Stop the engine's process and remove its socket. If this call is cancelled, stopping
        continues in the background, and the next call of `close` waits for it."""
        await self._close_once(STOP_GRACE_S)

    async def _close_once(self, grace_s: float) -> None:
        if self._closing is None or self._closing.done():
            self._closing = asyncio.ensure_future(self._close(grace_s))
        await asyncio.shield(self._closing)

    async def _wait_until_hung(self) -> str:
        last_success, num_failed = time.monotonic(), 0
        while num_failed < HUNG_AFTER_CHECKS or time.monotonic() - last_success < HUNG_AFTER_S:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            if await self.health():
                last_success, num_failed = time.monotonic(), 0
            else:
                num_failed += 1
        return f"{self._process.name} has not answered /health for {HUNG_AFTER_S:g} s and was ended"

    async def _close(self, grace_s: float) -> None:
        http, self._http = self._http, None
        if http is not None:
            await http.close()
        await self._process.close(grace_s)
        path, self._socket = self._socket, None
        if path is not None:
            self._spec.remove_socket(path)

    def _command(self, path: Path) -> list[str]:
        spec = self._spec
        command = [sys.executable, "-m", MODULES[spec.engine], "--socket", str(path)]
        command += ["--served-model-name", spec.served_model_name, "--run-dir", str(spec.run_dir)]
        command += ["--seed", str(spec.seed), *spec.extra_args]
        command += ["--allow-hub"] if spec.allow_hub else []
        command += ["--train-only"] if spec.train_only else []
        return command if spec.model is None else [*command, "--model", spec.model]

    async def _call(
        self,
        method: str,
        action: str,
        body: Json | None = None,
        rows: Mapping[str, Sequence[_Row]] | None = None,
    ) -> Json:
        """Send a control request to the engine, and return the reply. `rows` has the long lists of
        the request (calls and demonstrations), which are sent as further fields of the body.

        These lists may have hundreds of megabytes. Therefore a worker thread serialises them one
        element at a time, and the event loop sends them in small parts.

        Raises ActionFailed if the engine reports a failed action. The caller may then repeat the
        action. Raises BackendRefused if the user must correct something. Raises BackendError for
        all other failures. An example is a step that failed after it had changed some weights.
        """
        parts = None if rows is None else await asyncio.to_thread(_json_parts, body or {}, rows)
        if self._http is None:
            raise BackendError(f"{self._process.name} is not running")
        try:
            async with self._http.request(
                method,
                f"/control/{action}",
                json=body if parts is None else None,
                data=None if parts is None else _iterate(parts),
                headers=None if parts is None else JSON_HEADERS,
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BackendError(
                f"{self._process.name} did not answer {action}: {await self._cause(error)}"
            ) from error
        try:
            reply: Json = orjson.loads(raw)
        except ValueError as error:
            raise BackendError(f"{self._process.name} did not answer {action} in JSON") from error
        if reply.get("is_partial"):
            # Not ActionFailed: after an ActionFailed, the step would be repeated on weights that it
            # has already changed in part.
            raise BackendError(f"{action}: {reply.get('error')}")
        if "refusal" in reply:
            raise BackendRefused(reply["refusal"])
        if response.status != 200:
            raise ActionFailed(f"{action}: {reply.get('error')}")
        return reply

    async def _cause(self, error: Exception) -> str:
        """Return why a request got no answer: how the engine exited, or the network error. Only a
        broken connection is a sign of an exit. A connection that times out is not broken."""
        if isinstance(error, BROKEN_CONNECTION) and not isinstance(error, TimeoutError):
            message = await self._process.exit_message(EXIT_WAIT_S)
            if message is not None:
                return f"it{message.removeprefix(self._process.name)}"
        return _error_text(error)


def _error_text(error: Exception) -> str:
    """Return the text of a network error, without the connection's settings that aiohttp adds.

    >>> _error_text(ConnectionRefusedError(111, "Connection refused")), _error_text(TimeoutError())
    ('Connection refused', 'TimeoutError')
    """
    text = error.strerror if isinstance(error, OSError) else str(error)
    return text or type(error).__name__


def _json_parts(body: Json, rows: Mapping[str, Sequence[_Row]]) -> list[bytes]:
    """Serialise the JSON object `body`, with the lists in `rows` as additional fields, and return
    the text in parts. Each element of a list is a part of its own. Serialising a part holds the
    interpreter's lock (GIL), so other threads wait only for the time of one part."""
    assert body, "a step and a request for log-probabilities have fields of their own"
    parts = [json.dumps(body).removesuffix("}").encode()]
    for name, row_list in rows.items():
        parts.append(f", {json.dumps(name)}: [".encode())
        for number, row in enumerate(row_list):
            parts.append((", " if number else "").encode() + json.dumps(row.to_wire()).encode())
        parts.append(b"]")
    return [*parts, b"}"]


async def _iterate(parts: Sequence[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of a request body. aiohttp sends the next part when the engine has read most
    of the earlier parts."""
    for part in parts:
        yield part


def _unpack_rows(rows: Sequence[str]) -> list[FloatArray]:
    return [float_array(unpack_floats(row)) for row in rows]
