"""The state of a running demo. The state is polled from the proxy."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import aiohttp

from fakevllm.config.model import TrackingSection
from fakevllm.demo.gate_settings import PLANTED_FILE, PlantedSteps
from fakevllm.demo.release_watch import ReleaseWatch
from fakevllm.demo.view import Snapshot
from fakevllm.errors import FakevllmError
from fakevllm.processes.supervisor import SupervisedProcess
from fakevllm.runtime.local_engines import EngineChoice
from fakevllm.web.routes.admin import Stats
from fakevllm_adapters.protocol.releases import ReleasesReply
from fakevllm_adapters.protocol.swarm import EngineStatus, EngineStatusReply

POLL_EVERY_S = 0.5
FINAL_STATUS_TIMEOUT_S = 120.0
"""Seconds to wait for the final status. The time is long enough to restart a proxy or server that
has died, including the server's engine."""
EMBEDDED = EngineChoice.resolve("embedded")


HOOKS = Path(__file__).parent / "hooks"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    steps: int
    seed: int
    control: str
    run_dir: Path | None
    json_file: Path | None
    engines: EngineChoice = EMBEDDED
    lockstep: bool = False
    is_gated: bool = False
    """Whether versions are evaluated before they answer the app (`release.mode = "gated"`)."""
    planted: PlantedSteps | None = None
    """Steps that train with the opposite rewards; None if there are no such steps."""
    hooks: Path = HOOKS
    """The hooks of the proxy."""
    tracking: TrackingSection = field(default_factory=TrackingSection)
    """Where the curves are written, and the tables of samples."""
    trainer_args: tuple[str, ...] = ()
    """Extra arguments for the trainer, if the trainer is a process of its own."""
    async_steps: int = 0
    """The job's `async_steps`."""

    @property
    def engine_flags(self) -> list[str]:
        """The flags that choose the engines, for the server and for `fakevllm demo`."""
        arguments = (f"--trainer-arg={argument}" for argument in self.trainer_args)
        return [*self.engines.flags, *arguments]

    @property
    def tracking_flags(self) -> list[str]:
        """The flags with which the server writes the curves."""
        samples, every = self.tracking.samples, self.tracking.samples_every
        flags = [part for name in self.tracking.to for part in ("--track", name)]
        return [*flags, "--track-samples", str(samples), "--track-samples-every", str(every)]

    @property
    def folder(self) -> Path:
        return self.run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")


@dataclass(slots=True)
class Run:
    """A running demo. The object has the demo's processes, their addresses, and the latest status
    of the proxy."""

    settings: DemoSettings
    folder: Path
    server: SupervisedProcess
    proxy: SupervisedProcess
    server_url: str
    proxy_url: str
    stats: Stats | None = None
    phase: str = "starting the server and the proxy"
    notes: list[str] = field(default_factory=list[str])
    tokens_per_s: float = 0.0
    """Sampled tokens per second, measured between two polls of the proxy's statistics."""
    polled_at: float = 0.0
    releases: ReleaseWatch | None = None
    """The releases of a demo with the mode `gated`; None without this mode."""

    @property
    def step(self) -> int:
        """Number of the training step for which the server is collecting groups. The value is 1
        while the number is unknown."""
        return self.stats.engine.global_step or 1 if self.stats and self.stats.engine else 1

    @property
    def wants_more(self) -> bool:
        """True if the demo has training steps left to do. Raises FakevllmError if the engine
        reports that training has stopped."""
        engine = self.stats.engine if self.stats is not None else None
        if self.step > self.settings.steps:
            return False
        if engine and engine.engine_status is EngineStatus.ROLLING and engine.engine_status_detail:
            raise FakevllmError(f"Training has stopped: {engine.engine_status_detail}")
        return True

    def snapshot(self) -> Snapshot:
        snapshot = Snapshot(self.phase, self.step, self.settings.steps, notes=tuple(self.notes))
        if self.stats is None:
            return snapshot
        curve = self.stats.curve[: self.settings.steps]
        return replace(
            snapshot,
            policy_mean=[row.policy_mean for row in curve if row.policy_mean is not None],
            returned_best=[row.returned_best for row in curve if row.returned_best is not None],
            without_signal=sum(row.without_signal for row in curve),
            num_groups=sum(row.groups for row in curve),
            tokens_per_s=self.tokens_per_s,
            counts=sorted(self.stats.counts.items()),
            releases=None if self.releases is None else self.releases.line(),
        )


async def ready(run: Run, timeout_s: float | None = None) -> str:
    """Wait until the engine answers, and return the name of the served model. Raises FakevllmError
    if the engine does not start in time."""
    engines = run.settings.engines
    limit_s = engines.ready_timeout_s if timeout_s is None else timeout_s
    started = time.monotonic()
    try:
        async with asyncio.timeout(limit_s):
            while True:
                run.phase = f"starting ({engines.title}): {time.monotonic() - started:.0f} s"
                await poll(run)
                engine = run.stats.engine if run.stats is not None else None
                if engine is not None and (model := _served_model(engine)) is not None:
                    return model
                if engine is not None and engine.engine_status_detail:
                    run.notes[:] = [engine.engine_status_detail]
                await asyncio.sleep(POLL_EVERY_S)
    except TimeoutError:
        last = f": {run.notes[-1]}" if run.notes else ""
        raise FakevllmError(
            f"The engine was not ready within {limit_s:.0f} s{last}. "
            f"See {run.folder / 'server.log'} and proxy.log beside it."
        ) from None


def _served_model(engine: EngineStatusReply) -> str | None:
    """Return the served model's name. Return None while the engine is starting. Raise FakevllmError
    if the engine failed to start."""
    if engine.engine_status is EngineStatus.OFFLINE and engine.engine_status_detail:
        raise FakevllmError(f"The engine did not start: {engine.engine_status_detail}")
    return engine.model


async def keep_polling(run: Run) -> None:
    while True:
        await poll(run)
        await asyncio.sleep(POLL_EVERY_S)


async def wait_for_final_status(run: Run, timeout_s: float = FINAL_STATUS_TIMEOUT_S) -> None:
    """Fetch the proxy's statistics until they include the status of the server.

    A single request may fail or miss the server's status, because the server or the proxy may be
    restarting after a crash. Raises FakevllmError at the timeout.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not (await poll(run) and run.stats is not None and run.stats.engine is not None):
                await asyncio.sleep(POLL_EVERY_S)
    except TimeoutError:
        raise FakevllmError(
            f"The proxy did not report the final status within {timeout_s:.0f} s: "
            f"see {run.folder / 'proxy.log'}."
        ) from None


async def poll(run: Run) -> bool:
    """Fetch the proxy's statistics and store them in `run`.

    Return True on success. If the proxy is unreachable, return False and keep the last statistics.
    """
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(f"{run.proxy_url}/fakevllm/stats") as answer,
        ):
            answer.raise_for_status()
            stats = Stats.model_validate_json(await answer.read())
    except (aiohttp.ClientError, TimeoutError, OSError):
        return False
    now = time.monotonic()
    if run.stats is not None and stats.sampled_tokens > run.stats.sampled_tokens:
        run.tokens_per_s = (stats.sampled_tokens - run.stats.sampled_tokens) / (now - run.polled_at)
    run.stats, run.polled_at = stats, now
    if run.releases is not None:
        await _poll_releases(run, run.releases)
    return True


async def _poll_releases(run: Run, releases: ReleaseWatch) -> None:
    """Fetch the history of releases from the server, and add lines about new events to `run.notes`.
    If the server is unreachable, keep the last history."""
    engine = run.stats.engine if run.stats is not None else None
    if engine is not None and (lines := releases.version_seen(engine.weight_version, time.time())):
        run.notes += lines
        (run.folder / PLANTED_FILE).write_text(json.dumps(asdict(releases.times)))
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as http,
            http.get(f"{run.server_url}/releases") as answer,
        ):
            answer.raise_for_status()
            history = ReleasesReply.model_validate_json(await answer.read())
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        return
    run.notes += releases.history_read(history)
