"""The command `fakevllm forget`, which deletes texts and token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fakevllm.cli.options import ConfigFile, ProxyUrl, RunDir, SwarmKey
from fakevllm_runtime.commands import run_command


def forget(
    session: Annotated[
        str | None,
        typer.Option(help="Session to forget, by the beginning of its id, with its sub-agents."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Name or fingerprint of the app's key to forget.")
    ] = None,
    group_id: Annotated[
        str | None, typer.Option("--id", help="Id of one request or of its answer.")
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="The proxy's key file. Default: `keys` in the run directory."),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="Ledger file. Default: the one in --run-dir.")
    ] = None,
    url: ProxyUrl = None,
    proxy_key: Annotated[
        str | None, typer.Option(envvar="FAKEVLLM_KEY", help="API key for the proxy.")
    ] = None,
    swarm: Annotated[
        str | None,
        typer.Option(
            help="URL of the swarm server. Default: the address in the configuration file."
        ),
    ] = None,
    swarm_key: SwarmKey = None,
    run_dir: RunDir = None,
    config: ConfigFile = None,
) -> None:
    """Delete texts and token ids of a session, a key or a request. They are deleted from the ledger
    and from the server's journal. Rewards and counts stay."""

    def run() -> None:
        from fakevllm.config.model import load
        from fakevllm.errors import UserError
        from fakevllm.forgetting.command import ForgetSettings, run_forget
        from fakevllm.forgetting.report import lines, problems
        from fakevllm.ledger.forgotten_groups import TargetKind

        wanted = {TargetKind.SESSION: session, TargetKind.KEY: key, TargetKind.ID: group_id}
        targets = [(kind, value) for kind, value in wanted.items() if value]
        if len(targets) != 1:
            raise UserError("Name what to forget with one of --session, --key and --id.")
        ((kind, value),) = targets
        flags = {
            "proxy": {"run_dir": run_dir, "key_file": key_file},
            "swarm": {"url": swarm, "key": swarm_key},
        }
        settings = load(config, flags)
        report = run_forget(
            ForgetSettings(
                kind=kind,
                value=value,
                ledger=(settings.ledger_file if ledger is None else ledger).expanduser(),
                key_file=settings.key_file,
                proxy_url=url or (settings.local_url if settings.proxy.port else None),
                proxy_key=proxy_key,
                server_url=settings.swarm.url,
                server_key=settings.swarm.key,
            )
        )
        if not report.num_found:
            raise UserError(f"The ledger has no request of --{kind} {value}.")
        print("\n".join(lines(report)))
        if left := problems(report):
            for line in left:
                typer.echo(line, err=True)
            raise typer.Exit(1)

    run_command(run)
