"""`fakevllm demo` from start to end: processes up, probe, train on replayed traffic, probe again,
report."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import aiohttp
import openai
from rich.console import Console
from rich.live import Live

from fakevllm.demo.outcome import Outcome
from fakevllm.demo.probe import NUM_SAMPLES, Probe, probe
from fakevllm.demo.processes import Supervised, free_port
from fakevllm.demo.report import show
from fakevllm.demo.sums import all_tasks, endless_rows
from fakevllm.demo.view import Snapshot, render
from fakevllm.errors import FakevllmError, UserError
from fakevllm.replay.pace import paced
from fakevllm.replay.play import play, register
from fakevllm.replay.players import EndpointPlayer
from fakevllm.routes.groups import Stats
from fakevllm_adapters.swarm import TrainJob

HOOKS = Path(__file__).parent / "hooks"
CONCURRENCY = 8
MAX_TOKENS = 24
POLL_EVERY_S = 0.5
READY_TIMEOUT_S = 120.0

JOB = TrainJob(
    num_repeat=8, batch_size=8, lr=4e-4, ppo_epochs=2, clip_ratio_low=0.2, clip_ratio_high=0.28
)


@dataclass(frozen=True, slots=True)
class DemoSettings:
    steps: int
    seed: int
    control: str
    run_dir: Path | None
    json_file: Path | None
    backend: str

    @property
    def folder(self) -> Path:
        return self.run_dir or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")


@dataclass(slots=True)
class Run:
    """One running demo: where its processes are, what is known of it."""

    settings: DemoSettings
    folder: Path
    server: Supervised
    proxy: Supervised
    server_url: str
    proxy_url: str
    stats: Stats | None = None
    phase: str = "starting the server and the proxy"
    notes: list[str] = field(default_factory=list[str])
    rate: float = 0.0
    """Tokens sampled per second, between the last two looks."""
    polled_at: float = 0.0

    @property
    def step(self) -> int:
        """The step being collected, as far as is known."""
        return self.stats.engine.global_step or 1 if self.stats and self.stats.engine else 1

    def snapshot(self) -> Snapshot:
        shot = Snapshot(self.phase, self.step, self.settings.steps, notes=tuple(self.notes))
        if self.stats is None:
            return shot
        curve = self.stats.curve[: self.settings.steps]
        return replace(
            shot,
            policy_mean=[row.policy_mean for row in curve],
            returned_best=[row.returned_best or 0.0 for row in curve],
            without_signal=sum(row.without_signal for row in curve),
            num_groups=sum(row.groups for row in curve),
            tokens_per_s=self.rate,
            counts=sorted(self.stats.counts.items()),
        )


def run_demo(settings: DemoSettings) -> Outcome:
    """Raises UserError for what the user can mend."""
    if settings.backend == "embedded":
        _need_torch()
    console = Console()
    try:
        return asyncio.run(_demo(settings, console))
    except FakevllmError as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error


async def _demo(settings: DemoSettings, console: Console) -> Outcome:
    started = time.monotonic()
    async with _running(settings) as run:
        with Live(
            console=console, refresh_per_second=4, get_renderable=lambda: render(run.snapshot())
        ):
            model = await _ready(run)
            before = await _probe_once(run, model, "before")
            run.phase = "training on replayed traffic"
            await _train(run, model)
            after = await _probe_once(run, model, "after")
            run.phase = "done"
            await _poll(run)
        outcome = _outcome(run, before, after, time.monotonic() - started)
        show(console, outcome, before, after, run.folder / "ledger.sqlite")
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(outcome.as_json(), indent=1))
    return outcome


@asynccontextmanager
async def _running(settings: DemoSettings) -> AsyncGenerator[Run]:
    """The processes, kept up until the block ends; one that cannot be kept up ends it."""
    folder = settings.folder
    folder.mkdir(parents=True, exist_ok=True)
    server_port, proxy_port = free_port(), free_port()
    job = JOB.model_copy(
        update={
            "control": settings.control,
            "seed": settings.seed,
            "total_training_steps": settings.steps,
        }
    )
    config = folder / "fakevllm.toml"
    config.write_text(_toml(folder, server_port, proxy_port, job))
    model = ["--model", "demo"] if settings.backend == "embedded" else []
    server_arguments = ["start", "--backend", settings.backend, *model, "--port", str(server_port)]
    server_arguments += ["--run-dir", str(folder), "--seed", str(settings.seed)]
    run = Run(
        settings,
        folder,
        Supervised("the server", "fakevllm_server", server_arguments, folder / "server.log"),
        Supervised(
            "the proxy", "fakevllm", ["serve", "--config", str(config)], folder / "proxy.log"
        ),
        f"http://127.0.0.1:{server_port}",
        f"http://127.0.0.1:{proxy_port}",
    )
    body = asyncio.current_task()
    assert body is not None
    keepers = [asyncio.create_task(part.run(run.notes.append)) for part in (run.server, run.proxy)]

    def give_up(keeper: asyncio.Task[None]) -> None:
        if not keeper.cancelled():
            body.cancel()

    for keeper in keepers:
        keeper.add_done_callback(give_up)
    try:
        yield run
    except asyncio.CancelledError:
        for keeper in keepers:
            if keeper.done() and (error := keeper.exception()) is not None:
                raise error from None
        raise
    finally:
        for keeper in keepers:
            keeper.remove_done_callback(give_up)
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)


async def _ready(run: Run) -> str:
    """The served model's name, once the engine answers."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            await _poll(run)
            engine = run.stats.engine if run.stats is not None else None
            if engine is not None and engine.engine_status_detail:
                run.notes[:] = [engine.engine_status_detail]
            if engine is not None and engine.model is not None:
                return engine.model
            await asyncio.sleep(POLL_EVERY_S)


async def _probe_once(run: Run, model: str, name: str) -> Probe:
    """A resumed run keeps the probe it began with."""
    file = run.folder / f"probe_{name}.json"
    if name == "before" and file.exists():
        return Probe(**json.loads(file.read_text()))
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        run.phase = f"asking {NUM_SAMPLES} fixed questions {name} training: {done}"

    result = await probe(f"{run.server_url}/v1", model, all_tasks(), count)
    file.write_text(json.dumps(asdict(result)))
    return result


async def _train(run: Run, model: str) -> None:
    """Plays users until the last step is done."""
    tasks = all_tasks()
    keys = await register(f"{run.proxy_url}/v1", tasks)
    polling = asyncio.create_task(_keep_polling(run))
    played_before = run.stats.counts if run.stats is not None else {}
    rows = endless_rows(tasks, run.settings.seed, skip=sum(played_before.values()))
    http = openai.DefaultAioHttpClient()
    player = EndpointPlayer(f"{run.proxy_url}/v1", model, http, MAX_TOKENS)
    try:
        wanted = itertools.takewhile(lambda _: run.step <= run.settings.steps, rows)
        async with paced(player, run.proxy_url) as held:
            async for _ in play(wanted, held, lambda task: keys[task.task_id], CONCURRENCY):
                pass
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await http.aclose()


async def _keep_polling(run: Run) -> None:
    while True:
        await _poll(run)
        await asyncio.sleep(POLL_EVERY_S)


async def _poll(run: Run) -> None:
    """What the proxy says of the run; an unreachable one leaves the last word standing."""
    timeout = aiohttp.ClientTimeout(total=5)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.get(f"{run.proxy_url}/fakevllm/stats") as answer,
        ):
            answer.raise_for_status()
            stats = Stats.model_validate_json(await answer.read())
    except (aiohttp.ClientError, TimeoutError, OSError):
        return
    now = time.monotonic()
    if run.stats is not None and stats.sampled_tokens > run.stats.sampled_tokens:
        run.rate = (stats.sampled_tokens - run.stats.sampled_tokens) / (now - run.polled_at)
    run.stats, run.polled_at = stats, now


def _outcome(run: Run, before: Probe, after: Probe, wall_s: float) -> Outcome:
    assert run.stats is not None
    curve = run.stats.curve[: run.settings.steps]
    return Outcome(
        before=before.success,
        after=after.success,
        policy_mean=[row.policy_mean for row in curve],
        returned_best=[row.returned_best or 0.0 for row in curve],
        steps=run.settings.steps,
        requests=sum(run.stats.counts.values()),
        wall_s=wall_s,
        seed=run.settings.seed,
        control=run.settings.control,
        groups=run.stats.counts,
        groups_in_steps=sum(row.groups for row in curve),
        groups_without_signal=sum(row.without_signal for row in curve),
        restarts=run.server.num_restarts + run.proxy.num_restarts,
        run_dir=str(run.folder),
    )


def _toml(folder: Path, server_port: int, proxy_port: int, job: TrainJob) -> str:
    """The configuration of the demo's proxy, kept in the run's folder for the curious."""
    sections = {
        "proxy": {"port": proxy_port, "run_dir": str(folder)},
        "swarm": {"url": f"http://127.0.0.1:{server_port}"},
        "hooks": {"path": str(HOOKS)},
        "job": job.model_dump(exclude_none=True),
    }
    lines: list[str] = []
    for name, values in sections.items():
        # a JSON string or number is the same in TOML
        lines += [
            f"[{name}]",
            *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
            "",
        ]
    return "\n".join(lines)


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UserError(
            "The demo trains with torch, which is not installed: pip install -e '.[embedded]'"
        )
