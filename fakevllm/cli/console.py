"""The command line of `fakevllm console`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fakevllm.cli.options import ConfigFile, LedgerFile, ProxyKey, ProxyUrl, RunDir, SwarmKey
from fakevllm_runtime.commands import run_command


def console(
    url: ProxyUrl = None,
    key: ProxyKey = None,
    swarm: Annotated[
        str | None,
        typer.Option(help="URL of the swarm server. Default: the address in the configuration."),
    ] = None,
    swarm_key: SwarmKey = None,
    ledger: LedgerFile = None,
    hooks: Annotated[
        Path | None, typer.Option(help="Folder with the hook files, or one file.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on.")] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Further host name in the URLs of the console.")
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with API keys whose admins may log in; see `keys`."),
    ] = None,
    log_format: Annotated[
        Literal["human", "json"],
        typer.Option(help="human: readable lines. json: one JSON object per line."),
    ] = "human",
    run_dir: RunDir = None,
    config: ConfigFile = None,
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
    listen_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show what was logged and learnt as web pages."""

    def run() -> None:
        from fakevllm.config.model import load
        from fakevllm.console.command import run_console
        from fakevllm.console.hook_dry_run import DryRunSettings
        from fakevllm.console.settings import ConsoleSettings

        hosts = allow_host or None
        flags = {
            "proxy": {"run_dir": run_dir},
            "swarm": {"url": swarm, "key": swarm_key},
            "hooks": {"path": hooks},
            "console": {
                "host": host,
                "port": port,
                "key_file": key_file,
                "allowed_hosts": hosts,
            },
        }
        loaded = load(config, flags)
        settings = ConsoleSettings(
            loaded.ledger_file if ledger is None else ledger,
            loaded.local_url if url is None else url,
            proxy_key=key,
            server_url=loaded.swarm.url,
            server_key=loaded.swarm.key,
            reward_range=loaded.release.reward_range,
            datasets=[
                file
                for file in (loaded.dataset.file, loaded.release.eval_dataset)
                if file is not None
            ],
            redacts=loaded.job.privacy_or_default.redacts,  # it includes [privacy]
            dataset_field=loaded.dataset.field,
            num_for_baseline=loaded.feedback.num_for_baseline,
            host=loaded.console.host,
            port=loaded.console.port,
            allowed_hosts=loaded.console.allowed_hosts,
            key_file=loaded.console.key_file,
            app_keys=loaded.key_file,
            hooks=DryRunSettings.of(loaded),
        )
        run_console(
            settings,
            log_format=log_format,
            until_stdin_closes=until_stdin_closes,
            listen_fd=listen_fd,
        )

    run_command(run)
