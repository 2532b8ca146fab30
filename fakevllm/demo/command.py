"""Run `fakevllm demo`: start the processes, measure the model's accuracy (probe), train, measure
the accuracy again, and print a report."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

import openai
from rich.console import Console
from rich.live import Live
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from fakevllm.admission.dataset import endless_rows
from fakevllm.config.model import TrackingSection, load
from fakevllm.demo.accuracy_probe import NUM_SAMPLES, Probe, probe
from fakevllm.demo.gate_settings import HELD_OUT_FILE, PLANTED_FILE, release_section
from fakevllm.demo.gated_outcome import GatedOutcome, gated_outcome
from fakevllm.demo.progress_lines import ProgressLines
from fakevllm.demo.release_watch import PausingPlayer, PlantedTimes, ReleaseWatch
from fakevllm.demo.report import show
from fakevllm.demo.run_state import (
    EMBEDDED,
    POLL_EVERY_S,
    DemoSettings,
    Run,
    keep_polling,
    poll,
    ready,
    wait_for_final_status,
)
from fakevllm.demo.run_summary import Outcome
from fakevllm.demo.tasks import all_tasks, held_out_rows, training_tasks
from fakevllm.demo.view import Snapshot, render
from fakevllm.errors import ConfigError, FakevllmError, UserError
from fakevllm.ledger.store import Ledger
from fakevllm.processes.output import LogFile
from fakevllm.processes.run_folder import make_run_folder
from fakevllm.processes.supervisor import SupervisedProcess, supervise
from fakevllm.release.arm_gains import GroupOutcome
from fakevllm.replay.backpressure import follow_capacity
from fakevllm.replay.proxy_queries import register_tasks
from fakevllm.replay.retry_deadline import RETRY_FOR_S
from fakevllm.replay.row_runner import play
from fakevllm.replay.row_senders import EndpointPlayer, Player
from fakevllm.runtime.local_engines import EngineChoice
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.policy_names import policy_name
from fakevllm_adapters.protocol.swarm import Task

CONCURRENCY = 8
MAX_TOKENS = 24
ANY_PORT = ("127.0.0.1", 0)
MAX_EVALUATION_S = 120.0
"""Maximum seconds for which the demo waits, after the last step, until the last version is
evaluated."""
TRACKERS = ("tensorboard", "wandb")
MAX_RETURNS = 5
"""Maximum number of times that the demo repeats steps after the last step. The demo repeats steps
if training has gone back to an earlier version."""

JOB = TrainJob(
    num_repeat=8, batch_size=8, lr=2.5e-4, ppo_epochs=2, clip_ratio_low=0.2, clip_ratio_high=0.28
)


def run_demo(settings: DemoSettings) -> Outcome:
    """Run the demo and return its results. Raises UserError if the demo cannot start or fails."""
    if settings.lockstep and settings.engines != EMBEDDED:
        raise UserError("--lockstep is for the embedded engine, which decodes every answer alone.")
    if settings.async_steps and settings.lockstep:
        raise UserError("--async-steps does not go with --lockstep: take one of them out.")
    if settings.trainer_args and settings.engines.rollout == settings.engines.trainer:
        raise UserError(
            "--trainer-arg is for a trainer in a process of its own, as with --backend verl."
        )
    _check_gate(settings)
    for name in settings.tracking.to:
        if name not in TRACKERS:
            raise UserError(f"Unknown tracker {name!r}: --track takes {' or '.join(TRACKERS)}.")
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


def _check_gate(settings: DemoSettings) -> None:
    """Raise UserError if the settings of the release gate contradict each other."""
    if settings.planted is not None and not settings.is_gated:
        raise UserError("--plant-bad-step tests the release gate: add --gated.")
    if not settings.is_gated:
        return
    if settings.lockstep:
        raise UserError("--gated does not go with --lockstep: take one of them out.")
    if "vllm" in settings.engines.names or "verl" in settings.engines.names:
        raise UserError("--gated is for the embedded engine, which holds several versions.")
    if settings.planted is not None and settings.control != "none":
        raise UserError("--plant-bad-step does not go with --control: take one of them out.")
    if settings.planted is not None and settings.planted.first_step > settings.steps:
        raise UserError(
            f"--plant-bad-step {settings.planted.first_step} is after the last step: "
            f"choose a step up to {settings.steps}, or more --steps."
        )


@asynccontextmanager
async def shown(console: Console, snapshot: Callable[[], Snapshot]) -> AsyncGenerator[None]:
    """Show the run's progress while the `async with` block runs: as a live display, or as lines if
    the output is not a terminal."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, get_renderable=lambda: render(snapshot())):
            yield
        return
    lines = ProgressLines()
    printing = asyncio.create_task(_keep_printing(console, lines, snapshot))
    try:
        yield
    finally:
        printing.cancel()
        await asyncio.gather(printing, return_exceptions=True)
        _print_new(console, lines, snapshot())


async def _keep_printing(
    console: Console, lines: ProgressLines, snapshot: Callable[[], Snapshot]
) -> None:
    while True:
        _print_new(console, lines, snapshot())
        await asyncio.sleep(POLL_EVERY_S)


def _print_new(console: Console, lines: ProgressLines, snapshot: Snapshot) -> None:
    for line in lines.next(snapshot):
        console.print(line, markup=False, soft_wrap=True)


def _resume_command(settings: DemoSettings) -> str:
    command = ["fakevllm", "demo", "--run-dir", str(settings.run_dir)]
    command += ["--steps", str(settings.steps), *settings.engine_flags]
    command += [] if settings.control == "none" else ["--control", settings.control]
    command += ["--lockstep"] if settings.lockstep else []
    command += ["--async-steps", str(settings.async_steps)] if settings.async_steps else []
    command += ["--gated"] if settings.is_gated else []
    command += settings.tracking_flags if settings.tracking != TrackingSection() else []
    if settings.planted is not None:
        command += ["--plant-bad-step", str(settings.planted.first_step)]
    return " ".join(command)


async def _demo(settings: DemoSettings, console: Console) -> Outcome:
    started = time.monotonic()
    async with _running(settings) as run:
        async with shown(console, run.snapshot):
            model = await ready(run)
            before = await probe_once(run, model, "before")
            run.phase = "training on replayed traffic"
            await _train(run, model)
            if settings.is_gated:
                await _finish_evaluations(run, model)
            after = await probe_once(run, model, "after")
            gated = await _gated_outcome(run) if settings.is_gated else None
            run.phase = "done"
            await wait_for_final_status(run)
        outcome = replace(_outcome(run, before, after, time.monotonic() - started), gated=gated)
        show(console, outcome, before, after, run.folder / "ledger.sqlite")
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(outcome.as_json(), indent=1))
    return outcome


@asynccontextmanager
async def _running(settings: DemoSettings) -> AsyncGenerator[Run]:
    """Start the server and the proxy, run the `async with` block, and stop both processes. A
    process that dies while the block runs is restarted. If a process keeps dying, the block ends
    with an error."""
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
    """Write the run's configuration into the run folder, and return the run. The run's processes
    are not started yet.

    Raises UserError if the folder holds a run with other settings.
    """
    folder = settings.folder
    job = JOB.model_copy(
        update={
            "control": settings.control,
            "seed": settings.seed,
            "lockstep": settings.lockstep,
            "total_training_steps": settings.steps,
            "async_steps": settings.async_steps,
        }
    )
    server_port, proxy_port = server_socket.getsockname()[1], proxy_socket.getsockname()[1]
    config = folder / "fakevllm.toml"
    _require_same_kind(config, job, is_gated=settings.is_gated)
    _require_same_engines(folder / "engines.json", settings.engines)
    release = release_section(folder) if settings.is_gated else None
    config.write_text(_toml(settings, server_port, proxy_port, job, release))
    model = ["--model", "demo"] if settings.engines.has_model else []
    server = ["start", *settings.engine_flags, *model, "--port", str(server_port)]
    server += ["--run-dir", str(folder), "--seed", str(settings.seed), *settings.tracking_flags]
    if settings.is_gated:
        (folder / HELD_OUT_FILE).write_text(held_out_rows())
    environment = None if settings.planted is None else settings.planted.environment
    proxy = ["serve", "--config", str(config)]
    return Run(
        settings,
        folder,
        SupervisedProcess(
            "the server",
            "fakevllm_server",
            server,
            LogFile(folder / "server.log"),
            server_socket,
            environment,
        ),
        SupervisedProcess(
            "the proxy", "fakevllm", proxy, LogFile(folder / "proxy.log"), proxy_socket
        ),
        f"http://127.0.0.1:{server_port}",
        f"http://127.0.0.1:{proxy_port}",
        releases=_watch(settings) if settings.is_gated else None,
    )


def _watch(settings: DemoSettings) -> ReleaseWatch:
    file = settings.folder / PLANTED_FILE
    times = PlantedTimes(**json.loads(file.read_text())) if file.exists() else None
    return ReleaseWatch(settings.planted, times)


async def probe_once(run: Run, model: str, name: str) -> Probe:
    """Measure the model's accuracy, store the result in the run folder, and return it. `name` is
    `before` (before training), `after` (after training) or `after_released` (after training, with
    the released version). If the run is resumed, the accuracy `before` is not measured again, and
    the stored result is returned."""
    file = run.folder / f"probe_{name}.json"
    time_name = "before" if name == "before" else "after"
    if name == "before" and file.exists():
        return Probe(**json.loads(file.read_text()))
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        run.phase = f"probing with {NUM_SAMPLES} fixed questions {time_name} training: {done}"

    try:
        result = await probe(f"{run.server_url}/v1", model, all_tasks(), count)
    except openai.APIError as error:
        log_file = run.folder / "server.log"
        raise FakevllmError(
            f"The probe {time_name} training failed ({error.message}): see {log_file}."
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
    """Register the tasks at the proxy. Return a dict that maps each task's id to the API key for
    the requests for this task.

    The registration is retried while the proxy restarts. Raises ConfigError if the proxy stays
    unreachable.
    """
    return await register_tasks(f"{proxy_url}/v1", tasks)


async def _train(run: Run, model: str) -> None:
    """Send sums, such as 2 plus 3, through the proxy until the run's last training step is done."""
    tasks = training_tasks() if run.settings.is_gated else all_tasks()
    keys = await register_until_reachable(run.proxy_url, tasks)
    polling = asyncio.create_task(keep_polling(run))
    played_before = run.stats.counts if run.stats is not None else {}
    rows = endless_rows(tasks, run.settings.seed, skip=sum(played_before.values()))
    http = openai.DefaultAioHttpClient()
    player: Player = EndpointPlayer(f"{run.proxy_url}/v1", model, http, MAX_TOKENS)
    if run.releases is not None:
        player = PausingPlayer(player, run.releases.no_candidate)
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


async def _finish_evaluations(run: Run, model: str) -> None:
    """Wait until the last version is evaluated. If training goes back to an earlier version during
    the wait, train the lost steps again, and wait again."""
    assert run.releases is not None, "a gated run watches its releases"
    evaluate_every = int(str(release_section(run.folder)["evaluate_every"]))
    for _ in range(MAX_RETURNS):
        run.phase = "evaluating the last version"
        waits_until = time.monotonic() + MAX_EVALUATION_S
        while run.step > run.settings.steps and time.monotonic() < waits_until:
            engine = run.stats.engine if run.stats is not None else None
            version = (engine and engine.weight_version) or 0
            if not run.releases.is_due(version, evaluate_every):
                return
            await asyncio.sleep(POLL_EVERY_S)
            await poll(run)
        if run.step > run.settings.steps:
            return run.notes.append("the last version was not evaluated in time")
        run.phase = "training went back, and goes on"
        await _train(run, model)


async def _gated_outcome(run: Run) -> GatedOutcome:
    """Measure the accuracy of the released version, and return the results of the release gate."""
    watch = run.releases
    assert watch is not None, "a gated run watches its releases"
    await poll(run)
    if watch.history is None:
        raise FakevllmError(f"The server did not send its releases: see {run.folder}/server.log.")
    released = await probe_once(run, policy_name(watch.history.released), "after_released")
    groups = await asyncio.to_thread(_read_outcomes, run.folder / "ledger.sqlite")
    return gated_outcome(watch.history, groups, released.success, run.settings.planted, watch.times)


def _read_outcomes(ledger_file: Path) -> list[GroupOutcome]:
    # The proxy's own statistics are not used, because they count a session only ten minutes after
    # the session's last request.
    ledger = Ledger.open(ledger_file)
    try:
        return list(ledger.arms.outcomes(ledger.arms.newest_row()))
    finally:
        ledger.close()


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
        async_steps=run.settings.async_steps,
        rollout=run.settings.engines.rollout,
        trainer=run.settings.engines.trainer,
        groups=run.stats.counts,
        groups_in_steps=sum(row.groups for row in curve),
        groups_without_signal=sum(row.without_signal for row in curve),
        restarts=run.server.num_restarts + run.proxy.num_restarts,
        run_dir=str(run.folder),
    )


def _toml(
    settings: DemoSettings,
    server_port: int,
    proxy_port: int,
    job: TrainJob,
    release: dict[str, object] | None = None,
) -> str:
    """Return the text of the demo proxy's configuration file, fakevllm.toml."""
    sections = {
        "proxy": {"port": proxy_port, "run_dir": str(settings.folder)},
        "swarm": {"url": f"http://127.0.0.1:{server_port}"},
        "upstream": {"hold_s": RETRY_FOR_S},  # equal to the time for which the replay retries a row
        "hooks": {"path": str(settings.hooks)},
        "job": job.model_dump(exclude_none=True),
    }
    if release is not None:
        sections["release"] = release
    lines: list[str] = []
    for name, values in sections.items():
        # JSON and TOML have the same syntax for strings and numbers
        lines += [
            f"[{name}]",
            *(f"{key} = {json.dumps(value)}" for key, value in values.items()),
            "",
        ]
    return "\n".join(lines)


def _require_same_kind(config: Path, job: TrainJob, *, is_gated: bool = False) -> None:
    """Raise UserError if the run in this folder was started with another value of `--control`,
    `--lockstep`, `--async-steps` or `--gated`.

    With another value, the learning curve would mix points that cannot be compared.
    """
    if not config.exists():
        return
    loaded = load(config, {})
    before, was_gated = loaded.job, loaded.release.is_gated
    old = before.control, before.lockstep, before.async_steps, was_gated
    if old != (job.control, job.lockstep, job.async_steps, is_gated):
        kind = f"--control {before.control}" + (" --lockstep" if before.lockstep else "")
        kind += f" --async-steps {before.async_steps}" if before.async_steps else ""
        kind += " --gated" if was_gated else ""
        raise UserError(
            f"{config.parent} is a run with {kind}: resume it with these flags, "
            "or choose another --run-dir."
        )


def _require_same_engines(file: Path, engines: EngineChoice) -> None:
    """Raise UserError if the run in this folder was started with another rollout engine or trainer.

    A checkpoint can be loaded only by the kind of trainer that wrote it. All points of a learning
    curve should come from the same rollout engine.
    """
    if file.exists():
        before = EngineChoice(**json.loads(file.read_text()))
        if before != engines:
            raise UserError(
                f"{file.parent} is a run in which {before.title}: resume it with "
                f"{' '.join(before.flags) or '--backend embedded'}, or choose another --run-dir."
            )
    file.write_text(json.dumps(asdict(engines)))
