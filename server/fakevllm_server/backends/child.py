"""An engine in a child process: rollout and trainer behind one Unix socket.

The child is in its own session, so Ctrl-C reaches only the server, which stops it. It holds the
read end of a pipe
as standard input and leaves when that closes, so a killed server leaves no engine behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from fakevllm_adapters.swarm import TrainJob
from fakevllm_server.backends import BACKENDS
from fakevllm_server.backends.base import (
    ActionFailed,
    BackendError,
    BackendRefused,
    Batch,
    Endpoint,
    LossSpec,
    StepMetrics,
)

Json = dict[str, Any]

BOOT_TIMEOUT_S = 600
"""Loading a large model from a slow disk."""
CONTROL_TIMEOUT_S = 3600
"""One training step of a large model."""
STOP_GRACE_S = 10
REFUSED_EXIT_CODE = 2
"""An engine's word for: the user must mend something."""
MAX_SOCKET_PATH = 100
"""The kernel's limit for a Unix socket's path is 108 bytes."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """Which engine to run and how."""

    backend: str
    run_dir: Path
    model: str | None
    served_model_name: str
    seed: int = 0
    allow_hub: bool = False
    extra_args: Sequence[str] = ()

    @property
    def log_file(self) -> Path:
        return self.run_dir / "engine.log"


class ChildBackend:
    """Rollout, Trainer and Backend in one: a single process is all three."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None
        self._http: aiohttp.ClientSession | None = None
        self._socket: Path | None = None

    @property
    def rollout(self) -> ChildBackend:
        return self

    @property
    def trainer(self) -> ChildBackend:
        return self

    async def launch(self) -> Endpoint:
        await self.close()
        self._socket = _socket_path(self._spec.run_dir)
        self._socket.unlink(missing_ok=True)
        with self._spec.log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(self._socket),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ if self._spec.allow_hub else os.environ | {"HF_HUB_OFFLINE": "1"},
            )
        self._http = aiohttp.ClientSession(
            "http://engine",
            # A kept connection may be closed by the child just as a step is sent over it.
            connector=aiohttp.UnixConnector(str(self._socket), force_close=True),
            timeout=aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S),
        )
        await self._until_healthy(self._socket)
        info = await self._call("GET", "info")
        return Endpoint(
            self._socket,
            "http://engine",
            info["model_name"],
            info["max_model_len"],
            info["default_sampling"],
        )

    async def boot(self, job: TrainJob) -> None:
        await self._call("POST", "boot", {"job": job.model_dump()})

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        calls = [call.to_wire() for call in batch.calls]
        return await self._call(
            "POST", "step", {"step": batch.step, "calls": calls, "loss": asdict(loss)}
        )

    async def publish(self, version: int) -> None:
        await self._call("POST", "publish", {"version": version})

    async def load_weights(self, folder: Path, version: int) -> None:
        await self._call("POST", "load_weights", {"folder": str(folder), "version": version})

    async def export(self, folder: Path) -> None:
        await self._call("POST", "export", {"folder": str(folder)})

    async def save(self, folder: Path) -> None:
        await self._call("POST", "save", {"folder": str(folder)})

    async def restore(self, folder: Path) -> None:
        await self._call("POST", "restore", {"folder": str(folder)})

    async def health(self) -> bool:
        if self._http is None:
            return False
        try:
            async with self._http.get("/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def lost(self) -> str:
        assert self._process is not None, "launch first"
        code = await self._process.wait()
        told = f"the {self._spec.backend} engine exited with code {code}"
        if code == REFUSED_EXIT_CODE:
            return f"{told}: {_last_line(self._spec.log_file)}"
        # This reaches apps, and a log's end may be a traceback.
        return f"{told}; see {self._spec.log_file.name}"

    async def close(self) -> None:
        process, self._process = self._process, None
        http, self._http = self._http, None
        if http is not None:
            await http.close()
        if process is not None and process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_GRACE_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        path, self._socket = self._socket, None
        if path is not None:
            path.unlink(missing_ok=True)
            if path.parent != self._spec.run_dir.resolve():
                path.parent.rmdir()

    def _command(self, path: Path) -> list[str]:
        spec = self._spec
        command = [sys.executable, "-m", BACKENDS[spec.backend], "--socket", str(path)]
        command += ["--served-model-name", spec.served_model_name, "--run-dir", str(spec.run_dir)]
        command += ["--seed", str(spec.seed), *spec.extra_args]
        command += ["--allow-hub"] if spec.allow_hub else []
        return command if spec.model is None else [*command, "--model", spec.model]

    async def _until_healthy(self, path: Path) -> None:
        assert self._process is not None
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while not (path.exists() and await self.health()):
            if self._process.returncode is not None:
                refused = self._process.returncode == REFUSED_EXIT_CODE
                raise (BackendRefused if refused else BackendError)(await self.lost())
            if time.monotonic() > deadline:
                raise BackendError(
                    f"the {self._spec.backend} engine was not ready after {BOOT_TIMEOUT_S} s"
                )
            await asyncio.sleep(0.05)

    async def _call(self, method: str, action: str, body: Json | None = None) -> Json:
        if self._http is None:
            raise BackendError(f"the {self._spec.backend} engine is not running")
        try:
            async with self._http.request(method, f"/control/{action}", json=body) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BackendError(
                f"the {self._spec.backend} engine did not answer {action}: {error!r}"
            ) from error
        try:
            reply: Json = orjson.loads(raw)
        except ValueError as error:
            raise BackendError(
                f"the {self._spec.backend} engine did not answer {action} in JSON"
            ) from error
        if answer.status != 200:
            raise ActionFailed(f"{action}: {reply.get('error')}")
        return reply


def _socket_path(run_dir: Path) -> Path:
    path = run_dir.resolve() / "engine.sock"
    if len(str(path)) <= MAX_SOCKET_PATH:
        return path
    return Path(tempfile.mkdtemp(prefix="fakevllm-")) / "engine.sock"


def _last_line(log_file: Path) -> str:
    """Where an engine that refuses says why, in one line."""
    try:
        lines = log_file.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
