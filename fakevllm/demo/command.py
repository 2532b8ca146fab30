"""Run `fakevllm demo`: start the processes, measure the model's accuracy (probe), train, measure
the accuracy again, and print a report."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import openai
from rich.console import Console, RenderableType
from rich.live import Live
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from fakevllm.admission.dataset import endless_rows
from fakevllm.config.model import load
from fakevllm.demo.accuracy_probe import NUM_SAMPLES, Probe, probe
from fakevllm.demo.report import show
from fakevllm.demo.run_state import (
    EMBEDDED,
    POLL_EVERY_S,
    DemoSettings,
    Run,
    keep_polling,
    ready,
    wait_for_final_status,
)
from fakevllm.demo.run_summary import Outcome
from fakevllm.demo.tasks import all_tasks
from fakevllm.demo.view import render
from fakevllm.errors import ConfigError, FakevllmError, UserError
from fakevllm.replay.backpressure import follow_capacity
from fakevllm.replay.proxy_queries import register_tasks
from fakevllm.replay.retry_deadline import RETRY_FOR_S
from fakevllm.replay.row_runner import play
from fakevllm.replay.row_senders import EndpointPlayer
from fakevllm.runtime.local_engines import EngineChoice
from fakevllm.runtime.supervisor import SupervisedProcess, make_run_folder, supervise
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.swarm import Task

HOOKS = Path(__file__).parent / "hooks"
CONCURRENCY = 8
MAX_TOKENS = 24
ANY_PORT = ("127.0.0.1", 0)

JOB = TrainJob(
    num_repeat=8, batch_size=8, lr=2.5e-4, ppo_epochs=2, clip_ratio_low=0.2, clip_ratio_high=0.28
)


def run_demo(settings: DemoSettings) -> Outcome:
    """Run the demo and return its results. Raises UserError if the demo cannot start or fails."""
    if settings.lockstep and settings.engines != EMBEDDED:
        raise UserError("--lockstep is for the embedded engine, which decodes every answer alone.")
    settings.engines.check_installed()
    settings = replace(settings, run_dir=settings.folder)
    console = Console()
    try:
        return asyncio.run(_demo(settings, console))
    except KeyboardInterrupt:
        console.print(
            f"Stopped. To resume: {_resume_command(settings)}", markup=False, soft_wrap=True
        )
        raise
    except FakevllmError as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error


@contextmanager
def live(console: Console, render_now: Callable[[], RenderableType]) -> Generator[None]:
    """Show a live display while the `with` block runs. If the output is not a terminal, also print
    a line break at the end, because the library rich prints no line break after the last line."""
    try:
        with Live(console=console, refresh_per_second=4, get_renderable=render_now):
            yield
    finally:
        if not console.is_terminal:
            console.line()


def _resume_command(settings: DemoSettings) -> str:
    command = ["fakevllm", "demo", "--run-dir", str(settings.run_dir)]
    command += ["--steps", str(settings.steps), *settings.engines.flags]
    command += [] if settings.control == "none" else ["--control", settings.control]
    command += ["--lockstep"] if settings.lockstep else []
    return " ".join(command)


async def _demo(settings: DemoSettings, console: Console) -> Outcome:
    started = time.monotonic()
    async with _running(settings) as run:
        with live(console, lambda: render(run.snapshot())):
            model = await ready(run)
            before = await probe_once(run, model, "before")
            run.phase = "training on replayed traffic"
            await _train(run, model)
            after = await probe_once(run, model, "after")
            run.phase = "done"
            await wait_for_final_status(run)
        outcome = _outcome(run, before, after, time.monotonic() - started)
        show(console, outcome, before, after, run.folder / "ledger.sqlite")
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(outcome.as_json(), indent=1))
    return outcome


@asynccontextmanager
async def _running(settings: DemoSettings) -> AsyncGenerator[Run]:
    """Start the server and the proxy, and restart them if they die, until the `async with` block
    ends.

    If a process keeps dying, the block is ended with an error.
    """
    make_run_folder(settings.folder, "--run-dir")
    with (
        socket.create_server(ANY_PORT) as server_socket,
        socket.create_server(ANY_PORT) as proxy_socket,
    ):
        run = _prepare_run(settings, server_socket, proxy_socket)
        async with supervise((run.server, run.proxy), run.notes.append):
            yield run


def _prepare_run(
    settings: DemoSettings, server_socket: socket.socket, proxy_socket: socket.socket
) -> Run:
    """Write the run's configuration into the run folder, and return the run. Its processes are not
    started yet.

    Raises UserError if the folder holds a run with other settings.
    """
    folder = settings.folder
    job = JOB.model_copy(
        update={
            "control": settings.control,
            "seed": settings.seed,
            "lockstep": settings.lockstep,
            "total_training_steps": settings.steps,
        }
    )
    server_port, proxy_port = server_socket.getsockname()[1], proxy_socket.getsockname()[1]
    config = folder / "fakevllm.toml"
    _require_same_kind(config, job)
    _require_same_engines(folder / "engines.json", settings.engines)
    config.write_text(_toml(folder, server_port, proxy_port, job))
    model = ["--model", "demo"] if settings.engines.has_model else []
    server = ["start", *settings.engines.flags, *model, "--port", str(server_port)]
    server += ["--run-dir", str(folder), "--seed", str(settings.seed)]
    proxy = ["serve", "--config", str(config)]
    return Run(
        settings,
        folder,
        SupervisedProcess(
            "the server", "fakevllm_server", server, folder / "server.log", server_socket
        ),
        SupervisedProcess("the proxy", "fakevllm", proxy, folder / "proxy.log", proxy_socket),
        f"http://127.0.0.1:{server_port}",
        f"http://127.0.0.1:{proxy_port}",
    )


async def probe_once(run: Run, model: str, name: str) -> Probe:
    """Measure the model's accuracy, store the result in the run folder, and return it. `name` is
    `before` or `after` (training). If the run is resumed, the stored result `before` is returned
    and not measured again."""
    file = run.folder / f"probe_{name}.json"
    if name == "before" and file.exists():
        return Probe(**json.loads(file.read_text()))
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        run.phase = f"probing with {NUM_SAMPLES} fixed questions {name} training: {done}"

    try:
        result = await probe(f"{run.server_url}/v1", model, all_tasks(), count)
    except openai.APIError as error:
        log_file = run.folder / "server.log"
        raise FakevllmError(
            f"The probe {name} training failed ({error.message}): see {log_file}."
        ) from error
    file.write_text(json.dumps(asdict(result)))
    return result


@retry(
    retry=retry_if_exception_type(ConfigError),
    stop=stop_after_delay(RETRY_FOR_S),
    wait=wait_fixed(POLL_EVERY_S),
    reraise=True,
)
async def register_until_reachable(proxy_url: str, tasks: list[Task]) -> dict[str, str]:
    """Register the tasks at the proxy, and return a dict from each task's id to the API key with
    which requests for this task must be sent.

    The registration is retried while the proxy restarts. Raises ConfigError if the proxy stays
    unreachable.
    """
    return await register_tasks(f"{proxy_url}/v1", tasks)


async def _train(run: Run, model: str) -> None:
    """Send requests with sums through the proxy until the last training step of the run is done."""
    tasks = all_tasks()
    keys = await register_until_reachable(run.proxy_url, tasks)
    polling = asyncio.create_task(keep_polling(run))
    played_before = run.stats.counts if run.stats is not None else {}
    rows = endless_rows(tasks, run.settings.seed, skip=sum(played_before.values()))
    http = openai.DefaultAioHttpClient()
    player = EndpointPlayer(f"{run.proxy_url}/v1", model, http, MAX_TOKENS)
    try:
        needed_rows = itertools.takewhile(lambda _: run.wants_more, rows)
        async with follow_capacity(run.proxy_url) as capacity:
            concurrency = 1 if run.settings.lockstep else CONCURRENCY
            async for _ in play(
                needed_rows, player, lambda task: keys[task.task_id], concurrency, capacity
            ):
                pass
    finally:
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
        await http.aclose()


def _outcome(run: Run, before: Probe, after: Probe, wall_s: float) -> Outcome:
    assert run.stats is not None
    curve = run.stats.curve[: run.settings.steps]
    return Outcome(
        before=before.success,
        after=after.success,
        # Every step has a policy mean, because the demo's users never ask for a greedy answer.
        policy_mean=[row.policy_mean for row in curve if row.policy_mean is not None],
        returned_best=[row.returned_best for row in curve],
        steps=run.settings.steps,
        requests=sum(run.stats.counts.values()),
        wall_s=wall_s,
        seed=run.settings.seed,
        control=run.settings.control,
        lockstep=run.settings.lockstep,
        rollout=run.settings.engines.rollout,
        trainer=run.settings.engines.trainer,
        groups=run.stats.counts,
        groups_in_steps=sum(row.groups for row in curve),
        groups_without_signal=sum(row.without_signal for row in curve),
        restarts=run.server.num_restarts + run.proxy.num_restarts,
        run_dir=str(run.folder),
    )


def _toml(folder: Path, server_port: int, proxy_port: int, job: TrainJob) -> str:
    """Return the text of the demo proxy's configuration file, fakevllm.toml."""
    sections = {
        "proxy": {"port": proxy_port, "run_dir": str(folder)},
        "swarm": {"url": f"http://127.0.0.1:{server_port}"},
        "upstream": {"hold_s": RETRY_FOR_S},  # as long as the replay, also on a busy machine
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


def _require_same_kind(config: Path, job: TrainJob) -> None:
    """Raise UserError if the run in this folder was started with another value of `--control` or
    `--lockstep`.

    With another value, the learning curve would mix points that cannot be compared.
    """
    if not config.exists():
        return
    before = load(config, {}).job
    if (before.control, before.lockstep) != (job.control, job.lockstep):
        kind = f"--control {before.control}" + (" --lockstep" if before.lockstep else "")
        raise UserError(
            f"{config.parent} is a run with {kind}: resume it with these flags, "
            "or choose another --run-dir."
        )


def _require_same_engines(file: Path, engines: EngineChoice) -> None:
    """Raise UserError if the run in this folder was started with another rollout engine or trainer.

    A checkpoint can be loaded only by the kind of trainer that wrote it, and all points of a
    learning curve should come from the same rollout engine.
    """
    if file.exists():
        before = EngineChoice(**json.loads(file.read_text()))
        if before != engines:
            raise UserError(
                f"{file.parent} is a run in which {before.title}: resume it with "
                f"{' '.join(before.flags) or '--backend embedded'}, or choose another --run-dir."
            )
    file.write_text(json.dumps(asdict(engines)))
