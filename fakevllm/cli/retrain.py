"""The command `fakevllm retrain`, which trains logged groups again with the rewards of other
hooks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm.cli.options import (
    ConfigFile,
    EnginePair,
    LoggedDataset,
    RolloutEngine,
    Trainer,
    TrainerArguments,
    Where,
)
from fakevllm_runtime.commands import run_command


def retrain(
    hooks: Annotated[Path, typer.Option(help="Folder with the hook files, or one file.")],
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger file. Default: the one of the configuration.")
    ] = None,
    version: Annotated[
        int | None,
        typer.Option("--from", min=0, help="Version to start from. Default: the model itself."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="How often each group is trained.")] = 1,
    min_ess: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Smallest effective sample size of a step, as a share of its tokens. "
            "Default: job.min_logged_ess.",
        ),
    ] = None,
    where: Where = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="Train only so many groups, the newest ones.")
    ] = None,
    dataset: LoggedDataset = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder. Default: the model of the logged run.")
    ] = None,
    server_run_dir: Annotated[
        Path | None,
        typer.Option(
            help="Run directory of the logged run's server. Default: the ledger's folder."
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(help="New folder for the new run. Default: runs/retrain-TIME."),
    ] = None,
    backend: EnginePair = "embedded",
    rollout: RolloutEngine = None,
    trainer: Trainer = None,
    allow_hub: Annotated[
        bool, typer.Option("--allow-hub", help="Load the model by its name on the hub.")
    ] = False,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="Extra argument for the engine, as --engine-arg=ARG; repeatable."),
    ] = None,
    trainer_arg: TrainerArguments = None,
    parallel: Annotated[int, typer.Option(min=1, help="Groups scored at the same time.")] = 4,
    lockstep: Annotated[
        bool, typer.Option("--lockstep", help="Make two runs with one seed identical to the bit.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Train logged requests again, with the rewards of other hooks."""

    def run() -> None:
        from fakevllm.admission.dataset import tasks_by_id
        from fakevllm.admission.held_out import HeldOutRows
        from fakevllm.admission.row_requests import read_held_out_rows
        from fakevllm.config.model import load
        from fakevllm.hooks.sandbox import HookSandbox
        from fakevllm.retraining.command import RetrainSettings, run_retrain
        from fakevllm.runtime.local_engines import EngineChoice

        flags = {
            "dataset": {"file": dataset},
            "job": {"lockstep": lockstep or None, "min_logged_ess": min_ess},
        }
        settings = load(config, flags)
        rows, held_out = settings.dataset, settings.release.eval_dataset
        ledger_file = settings.ledger_file if ledger is None else ledger.expanduser()
        report = run_retrain(
            RetrainSettings(
                ledger=ledger_file,
                hooks=hooks,
                timeout_s=settings.hooks.timeout_s,
                job=settings.job,
                server_run_dir=(server_run_dir or ledger_file.parent).expanduser(),
                run_dir=None if run_dir is None else run_dir.expanduser(),
                version=version,
                epochs=epochs,
                where=where,
                last=last,
                model=model,
                engines=EngineChoice.resolve(backend, rollout, trainer),
                allow_hub=allow_hub,
                engine_args=tuple(engine_arg or ()),
                trainer_args=tuple(trainer_arg or ()),
                concurrency=parallel,
                failure_floor=settings.reward.failure_floor,
                sandbox=HookSandbox(settings.hooks.environment, settings.hooks.memory_mb),
                held_out=(
                    HeldOutRows() if held_out is None else read_held_out_rows(held_out, rows.field)
                ),
                tasks=tasks_by_id(rows.file, rows.field),
                json_file=json_file,
            )
        )
        if report.num_steps == report.num_without_update:
            raise typer.Exit(1)

    run_command(run)
