"""Run `fakevllm retrain`: start a server, score logged groups with the hooks, and train on them."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from fakevllm.admission.held_out import HeldOutRows
from fakevllm.errors import FakevllmError, UserError
from fakevllm.hooks.sandbox import DEFAULT_SANDBOX, HookSandbox
from fakevllm.ledger.broken_rows import READ_ERRORS
from fakevllm.ledger.offline_copy import offline_ledger
from fakevllm.ledger.selection import GroupSelection
from fakevllm.ledger.store import Ledger
from fakevllm.processes.output import LogFile
from fakevllm.processes.run_folder import make_run_folder
from fakevllm.processes.supervisor import SupervisedProcess, supervise
from fakevllm.rescoring.logged_groups import MIN_ANSWERS
from fakevllm.rescoring.rescorer import Rescorer, Scorer
from fakevllm.retraining import server_calls
from fakevllm.retraining.group_feeder import GroupFeeder
from fakevllm.retraining.group_reader import GroupReader, NotTrained
from fakevllm.retraining.report import RetrainReport, Staleness, render
from fakevllm.retraining.sample_size_limit import SampleSizeLimit
from fakevllm.retraining.source_run import RunModel, SourceRun
from fakevllm.retraining.token_check import (
    NUM_CHECKED,
    NUM_READ,
    are_same_tokens,
    by_run,
    plain_answer,
    spread,
)
from fakevllm.runtime.json_file import write_json
from fakevllm.runtime.local_engines import EngineChoice
from fakevllm.runtime.progress_bar import progress_bar
from fakevllm.sdk.engine_control import ensure_running, status_with_retries
from fakevllm.sdk.http_driver import AsyncHttpDriver
from fakevllm.sdk.protocol import Backoff
from fakevllm.sdk.types import SwarmError
from fakevllm.settlement.held_out_groups import has_held_out_rows
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.privacy.in_use import RedactionInUse
from fakevllm_adapters.protocol.swarm import Task

HOST = "127.0.0.1"
SERVER_START_S = 60.0
"""Seconds of pauses for which the command waits for the process of the server. The engine starts
later, and has its own limit."""


@dataclass(frozen=True, slots=True)
class RetrainSettings:
    ledger: Path
    hooks: Path
    timeout_s: float
    """Time limit of a hook call, in seconds."""
    job: TrainJob
    server_run_dir: Path
    """Run directory of the server whose run sampled the groups."""
    run_dir: Path | None = None
    """New run directory; None means a new folder in `runs`."""
    version: int | None = None
    """Version of the weights with which training starts; None means the model itself."""
    epochs: int = 1
    where: str | None = None
    last: int | None = None
    model: str | None = None
    engines: EngineChoice = field(default_factory=lambda: EngineChoice.resolve("embedded"))
    allow_hub: bool = False
    """Whether the model may be loaded by its name on the hub."""
    engine_args: tuple[str, ...] = ()
    trainer_args: tuple[str, ...] = ()
    """Extra arguments for the engines, which the server gets unchanged."""
    concurrency: int = 4
    failure_floor: float | None = None
    sandbox: HookSandbox = DEFAULT_SANDBOX
    held_out: HeldOutRows = field(default_factory=HeldOutRows)
    tasks: Mapping[str, Task] = field(default_factory=dict[str, Task])
    json_file: Path | None = None

    def server_flags(self, model: str | None, folder: Path) -> list[str]:
        """Return the server's command-line flags for the new run, except the flag `--port`."""
        return [
            *self.engines.flags,
            *([] if model is None else ["--model", model]),
            *(["--allow-hub"] if self.allow_hub else []),
            *(f"--engine-arg={one}" for one in self.engine_args),
            *(f"--trainer-arg={one}" for one in self.trainer_args),
            *("--run-dir", str(folder), "--seed", str(self.job.seed)),
        ]

    def fill_a_step(self, num_groups: int) -> bool:
        """Return True if `num_groups` groups are enough for one training step. Each group is sent
        once in each of `epochs` epochs."""
        return num_groups * self.epochs >= self.job.batch_size

    def redaction(self) -> RedactionInUse:
        """Return the redaction settings of the job, which apply to everything that the command
        stores and that the hooks print."""
        return RedactionInUse(self.job.privacy_or_default)

    @property
    def training_job(self) -> TrainJob:
        """The job (the training settings) of the new run. The job sets no last step, and a step
        begins as soon as there are enough groups."""
        default = TrainJob()
        return self.job.model_copy(
            update={
                "experiment_name": None,
                "model": None,
                "total_training_steps": None,
                "swarm_mode_sample_collection_method": (
                    default.swarm_mode_sample_collection_method
                ),
            }
        )


def run_retrain(settings: RetrainSettings, console: Console | None = None) -> RetrainReport:
    """Train logged groups (requests with their answers) in a new run, print the figures of the run
    as a table, and return the figures. Raises UserError if nothing can be trained, or if training
    stops. If the command ends before the first update, because of a UserError or an interrupt, the
    new run directory is removed."""
    console = console or Console()
    if settings.version is not None and not settings.engines.has_model:
        raise UserError("--from is for engines with a model: the fake engine has none.")
    if settings.json_file is not None and not settings.json_file.parent.is_dir():
        raise UserError(f"The folder of --json {settings.json_file} does not exist: create it.")
    settings.engines.check_installed()
    folder = settings.run_dir or Path("runs") / time.strftime("retrain-%Y%m%d-%H%M%S")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"The folder {folder} is not empty: choose a new --run-dir.")
    file = offline_ledger(settings.ledger)
    if not settings.held_out and has_held_out_rows(file):
        raise UserError(
            f"{file} has held-out rows, which must not be trained, and release.eval_dataset is not "
            "set: name the configuration of the proxy with --config."
        )
    selected = GroupSelection(file, settings.where, settings.last, MIN_ANSWERS).find()
    group_ids = list(selected.ids())
    if not settings.fill_a_step(len(group_ids)):
        raise UserError(
            f"A training step needs {settings.job.batch_size} groups (job.batch_size), and "
            f"{len(group_ids)} of {file} can be scored: select more, or lower job.batch_size."
        )
    make_run_folder(folder, "--run-dir")
    ledger = Ledger.open(file, redaction=settings.redaction())
    report = RetrainReport(Staleness(settings.version or 0), num_selected=len(group_ids))
    is_complete = False
    try:
        run_ids = ledger.calls.run_ids()
        source = SourceRun.find(settings.server_run_dir, map(run_ids.get, group_ids))
        model = _model(settings, source, folder)
        with ledger.reading():
            report.staleness.run_id = source.run_id or next(iter(ledger.runs()), "")
        with progress_bar() as bar:
            retraining = _Retraining(settings, folder, source, ledger, group_ids, report, bar)
            asyncio.run(retraining.run(model))
        is_complete = True
    except (UserError, KeyboardInterrupt):
        if report.num_steps == report.num_without_update:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except (FakevllmError, SwarmError) as error:
        log_file = str(folder / "server.log")
        hint = "" if log_file in str(error) else f" (see {log_file})"
        raise UserError(f"{str(error).removesuffix('.')}{hint}.") from error
    finally:
        ledger.close()
        if report.num_steps:
            console.print(render(report, f"{settings.hooks}: {folder}"))
        has_figures = is_complete or report.num_steps > report.num_without_update
        if settings.json_file is not None and has_figures:
            write_json(settings.json_file, {"run_dir": str(folder), **report.as_json()})
    for line in _next_steps(report, folder):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return report


@dataclass(slots=True)
class _Retraining:
    """One run of `fakevllm retrain`, from the start of its swarm server until the server stops."""

    settings: RetrainSettings
    folder: Path
    source: SourceRun
    ledger: Ledger
    group_ids: Sequence[str]
    report: RetrainReport
    bar: Progress

    async def run(self, model: str | None) -> None:
        """Start the server with a model, score the groups with the hooks, and train the groups. The
        model is checked before the hooks run, because hooks may make paid requests."""
        settings = self.settings
        async with self._server_url(model) as url:
            driver = AsyncHttpDriver(url)
            try:
                await self._start_engine(driver)
                if settings.version is None:
                    self.source.check_same_model(RunModel.read(self.folder))
                await self._check_tokens(driver, self._reader(""))
                hook_hash = await self._score()
                task = self.bar.add_task("training", total=len(self.group_ids) * settings.epochs)
                feeder = GroupFeeder(
                    driver,
                    self._reader(hook_hash).read,
                    self.report,
                    hook_hash,
                    SampleSizeLimit(settings.job.min_logged_ess),
                    lambda: self.bar.advance(task),
                )
                await feeder.feed(self.group_ids, settings.epochs)
            finally:
                await driver.close()

    @asynccontextmanager
    async def _server_url(self, model: str | None) -> AsyncGenerator[str]:
        """Start a server, and yield its URL. When the `with` block ends, the server saves a
        checkpoint and stops."""
        settings, log = self.settings, LogFile(self.folder / "server.log")
        with socket.create_server((HOST, 0)) as listener:
            port = listener.getsockname()[1]
            flags = ["start", "--port", str(port), *settings.server_flags(model, self.folder)]
            server = SupervisedProcess("the server", "fakevllm_server", flags, log, listener)
            async with supervise([server], self.bar.console.print):
                yield f"http://{HOST}:{port}"

    async def _start_engine(self, driver: AsyncHttpDriver) -> None:
        task = self.bar.add_task("starting the engine", total=None)
        await driver.run(status_with_retries(Backoff(SERVER_START_S)))
        job, limit_s = self.settings.training_job, self.settings.engines.ready_timeout_s
        await driver.run(ensure_running(job, force_restart=False, timeout_s=limit_s))
        self.bar.remove_task(task)

    async def _check_tokens(self, driver: AsyncHttpDriver, reader: GroupReader) -> None:
        """Leave out the groups of each earlier run whose model has another tokenizer than the
        engine's model. Raises UserError if too few groups for a step are left."""
        runs = by_run(self.group_ids, await asyncio.to_thread(self.ledger.calls.run_ids))
        others, names = set[str](), set[str]()
        for group_ids in runs.values():
            other = await self._other_model(driver, reader, group_ids)
            if other is not None:
                others.update(group_ids)
                names.add(other)
        self.group_ids = [one for one in self.group_ids if one not in others]
        if others:
            self.report.skipped["other_tokens"] += len(others)
        if others and not self.settings.fill_a_step(len(self.group_ids)):
            used = RunModel.read(self.folder)
            models = ", ".join(sorted(names))
            raise UserError(
                f"The tokens of the model {models} in the ledger are not those of "
                f"{'the model' if used is None else used.label}: name the model that sampled them "
                "with --model."
            )

    async def _other_model(
        self, driver: AsyncHttpDriver, reader: GroupReader, group_ids: Sequence[str]
    ) -> str | None:
        """Decode some answers of one run with the tokenizer of the engine's model. If most of the
        texts differ from the recorded texts, return the name of the model that sampled the answers.
        Otherwise return None."""
        num_equal, names = 0, list[str]()
        for group_id in spread(group_ids, NUM_READ):
            try:
                group = await asyncio.to_thread(reader.read, group_id)
                answer = plain_answer(group)
            except (NotTrained, *READ_ERRORS):
                continue
            if answer is None:
                continue
            names.append(group.record.model)
            decoded = await driver.run(server_calls.text_of(answer.token_ids))
            num_equal += decoded is not None and answer.is_text_of(decoded)
            if len(names) == NUM_CHECKED:
                break
        return None if are_same_tokens(num_equal, len(names)) else names[0]

    async def _score(self) -> str:
        """Score the groups with the hooks, and return the content hash of the hook files."""
        settings = self.settings
        scorer = Scorer(
            settings.hooks,
            settings.timeout_s,
            settings.sandbox,
            settings.concurrency,
            settings.failure_floor,
            settings.tasks,
            settings.redaction(),
        )
        task = self.bar.add_task("scoring", total=len(self.group_ids))
        async with Rescorer(self.ledger, scorer) as rescorer:
            async for _ in rescorer.score(self.group_ids):
                self.bar.advance(task)
            await rescorer.flush()
            return rescorer.hook_hash

    def _reader(self, hook_hash: str) -> GroupReader:
        settings = self.settings
        return GroupReader(
            self.ledger, hook_hash, settings.failure_floor, settings.held_out, settings.tasks
        )


def _model(settings: RetrainSettings, source: SourceRun, folder: Path) -> str | None:
    """Return the model with which the server starts; None for the fake engine. Raises UserError if
    the model that sampled the groups is unknown."""
    if settings.version is not None:
        exported = folder / "start-model"
        source.export(settings.version, exported, settings.model, allow_hub=settings.allow_hub)
        return str(exported)
    recorded = source.model
    if not settings.engines.has_model:
        source.check_same_model(RunModel(None, None))
    if settings.model is not None or not settings.engines.has_model:
        return settings.model
    if recorded is None or recorded.name is None:
        raise UserError(
            f"The model that sampled the groups is unknown, because {source.folder} is no run "
            "directory of a server with a model: name the model with --model, or the run directory "
            "with --server-run-dir."
        )
    return recorded.name


def _next_steps(report: RetrainReport, folder: Path) -> list[str]:
    if not report.num_steps:
        return ["No step was trained: the groups above were too few, or none could be trained."]
    if report.num_steps == report.num_without_update:
        return ["No step made an update, so the weights are those with which training started."]
    export = f"fakevllm-server checkpoints export {report.last_step} FOLDER --run-dir {folder}"
    return [
        "To serve the trained weights, write them to a new model folder, and start a server with "
        "it:",
        f"  {export}",
        "  fakevllm-server start --model FOLDER --run-dir NEW_FOLDER",
    ]
