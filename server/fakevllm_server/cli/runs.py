"""`fakevllm-server runs`: list the runs below a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm_server.cli.exit_codes import run_server_command


def runs(
    run_dir: Annotated[
        Path, typer.Option(readable=False, help="Run directory of the server.")
    ] = Path("runs/default"),
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per run.")
    ] = False,
) -> None:
    """List the runs below a run directory, with their sizes. The command also works while a server
    runs."""

    def run() -> None:
        import json
        from dataclasses import asdict

        from fakevllm_runtime.errors import ConfigError
        from fakevllm_server.run.run_list import list_runs

        summaries = list_runs(run_dir)
        if not summaries:
            raise ConfigError(
                f"{run_dir} has no run: set --run-dir to the run directory of a server."
            )
        for summary in summaries:
            if json_output:
                print(json.dumps(asdict(summary)))
                continue
            step = "?" if summary.last_step is None else summary.last_step
            print(
                f"{summary.folder}: experiment {summary.experiment_name or '-'}, "
                f"model {summary.model or '-'}, step {step}, {summary.num_bytes / 1e6:.1f} MB"
            )

    run_server_command(run)
