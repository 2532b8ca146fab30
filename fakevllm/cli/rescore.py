"""The command `fakevllm rescore`, which runs other hooks over the logged groups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm.cli.options import ConfigFile, LedgerFile, LoggedDataset, RunDir, Where
from fakevllm_runtime.commands import run_command


def rescore(
    hooks: Annotated[Path, typer.Option(help="Folder with the hook files, or one file.")],
    ledger: LedgerFile = None,
    where: Where = None,
    last: Annotated[
        int | None, typer.Option(min=1, help="Score only so many groups, the newest ones.")
    ] = None,
    dataset: LoggedDataset = None,
    parallel: Annotated[int, typer.Option(min=1, help="Groups at the same time.")] = 4,
    again: Annotated[
        bool, typer.Option("--again", help="Also score groups that these hooks have scored before.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    run_dir: RunDir = None,
    config: ConfigFile = None,
) -> None:
    """Score logged requests with other hooks, and compare."""

    def run() -> None:
        from fakevllm.admission.dataset import tasks_by_id
        from fakevllm.config.model import load
        from fakevllm.hooks.sandbox import HookSandbox
        from fakevllm.rescoring.command import RescoreSettings, run_rescore

        settings = load(config, {"proxy": {"run_dir": run_dir}, "dataset": {"file": dataset}})
        rows = settings.dataset
        rescore_settings = RescoreSettings(
            ledger=settings.ledger_file if ledger is None else ledger.expanduser(),
            hooks=hooks,
            timeout_s=settings.hooks.timeout_s,
            where=where,
            last=last,
            concurrency=parallel,
            again=again,
            failure_floor=settings.reward.failure_floor,
            sandbox=HookSandbox(settings.hooks.environment, settings.hooks.memory_mb),
            json_file=json_file,
            tasks=tasks_by_id(rows.file, rows.field),
            privacy=settings.job.privacy_or_default,
        )
        if not run_rescore(rescore_settings):
            raise typer.Exit(1)

    run_command(run)
