"""The command line of `fakevllm-server`.

Slow imports are inside the commands' functions, so that `--help` is fast.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fakevllm_server.cli import checkpoints, curves, plan, runs
from fakevllm_server.cli.exit_codes import run_server_command
from fakevllm_server.cli.server_file import (
    ServerFile,
    read_server_file,
    split_arguments,
)
from fakevllm_server.config.sample_tables import DEFAULT_EVERY, SampleTableSettings

if TYPE_CHECKING:
    from fakevllm_server.config.model import ServerConfig

app = typer.Typer(
    name="fakevllm-server",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # with rich, `--help` takes twice as long
)
app.add_typer(checkpoints.app)
app.command()(curves.curves)
app.command()(plan.plan)
app.command()(runs.runs)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(f"fakevllm-server {version('fakevllm')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version."),
    ] = False,
) -> None:
    """The swarm server runs the engine, captures model calls and trains the model."""


def _load_config_file(context: typer.Context, file: Path | None) -> Path | None:
    """Use the values in a configuration file as the defaults of the flags of `start`, and keep the
    content of the file in `context.obj`.

    Flags on the command line override these defaults.
    """
    if file is None:
        return None

    def load() -> None:
        settings = read_server_file(file, start)
        context.obj = settings
        context.default_map = settings.flags

    run_server_command(load)
    return file


@app.command()
def start(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=_load_config_file,
            is_eager=True,
            help="File with these flags: YAML, or TOML with a table [server]. The command line "
            "overrides the file.",
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check the flags and the file, print address, run directory and engines as JSON, "
            "and exit.",
        ),
    ] = False,
    backend: Annotated[
        str, typer.Option(help="Rollout engine and trainer: embedded | vllm | verl | fake.")
    ] = "embedded",
    rollout: Annotated[
        str | None,
        typer.Option(help="Rollout engine, if not the backend's: embedded | vllm | fake."),
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(help="Trainer, if not the backend's: embedded | verl | fake.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, or `demo`; overrides the job's model.")
    ] = None,
    models_dir: Annotated[
        Path | None, typer.Option(help="Folder with the models that a job may name.")
    ] = None,
    run_dir: Annotated[
        Path,
        typer.Option(readable=False, help="Folder for checkpoints, logs and the engine's socket."),
    ] = Path("runs/default"),
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. Any address but loopback requires --key-file."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 10086,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="Name of the model for apps. Default: the model folder's name."),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(help="File with the API keys of proxies and clients, one per line."),
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Additional name allowed in the `Host` header.")
    ] = None,
    allow_hub: Annotated[
        bool,
        typer.Option(
            help="Allow --model to be a name on the Hugging Face hub, from which the engines then "
            "download the model."
        ),
    ] = False,
    allow_train_code: Annotated[
        bool, typer.Option(help="Keep training code that clients upload; it is never run.")
    ] = False,
    keep_latest_call: Annotated[
        bool,
        typer.Option(
            help="Keep the latest call for /replay_latest_llm_call (debugging). Each open call "
            "then needs up to 2 MiB more memory."
        ),
    ] = False,
    media_domain: Annotated[
        list[str] | None,
        typer.Option(help="Host from which vLLM may fetch images, audio and video. Default: none."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the engine.")] = 0,
    engine_arg: Annotated[
        list[str] | None,
        typer.Option(help="Additional argument for the rollout engine: --engine-arg=--device=cpu."),
    ] = None,
    trainer_arg: Annotated[
        list[str] | None,
        typer.Option(help="Additional argument for a trainer with a process of its own."),
    ] = None,
    rollout_url: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a running vLLM to use instead of starting one. Give it several times for "
            "several replicas."
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="Number of rollout engines to start, all with the same weights.")
    ] = 1,
    rollout_key_file: Annotated[
        Path | None, typer.Option(help="File with the API key for --rollout-url.")
    ] = None,
    weights_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for weights, shared with the vLLM. Default: in memory."),
    ] = None,
    weight_transport: Annotated[
        str,
        typer.Option(
            help="How new weights get from the trainer to vLLM: folder | vllm (vLLM's weight "
            "transfer routes)."
        ),
    ] = "folder",
    redact: Annotated[
        list[str] | None,
        typer.Option(help="Redact texts of this kind: email | phone | card | api_key."),
    ] = None,
    redact_pattern: Annotated[
        list[str] | None,
        typer.Option(help="Redact matches of a regular expression of RE2, as NAME=EXPRESSION."),
    ] = None,
    retention_days: Annotated[
        int, typer.Option(help="Days after which calls are pruned; 0: never.", min=0)
    ] = 0,
    max_journal_mb: Annotated[
        int, typer.Option(help="Size in MB above which old calls are pruned; 0: any.", min=0)
    ] = 0,
    track: Annotated[
        list[str] | None,
        typer.Option(
            help="Where curves are written: tensorboard | wandb | none. Default: tensorboard, if "
            "it is installed."
        ),
    ] = None,
    track_samples: Annotated[
        int,
        typer.Option(help="Groups in each table of sampled answers; 0: no tables."),
    ] = 0,
    track_samples_every: Annotated[
        int, typer.Option(help="Steps between two tables of sampled answers.")
    ] = DEFAULT_EVERY,
    log_format: Annotated[
        Literal["human", "json"],
        typer.Option(help="Log lines for people, or one JSON object per line."),
    ] = "human",
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
    listen_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Start the server. The engine starts when a client sends a job."""
    from fakevllm_runtime.engines import check_installed
    from fakevllm_server.config.model import DEFAULT_TRACKERS, ServerConfig, read_key, read_keys
    from fakevllm_server.config.privacy import read_privacy
    from fakevllm_server.config.start_check import check_start
    from fakevllm_server.curves.trackers import read_trackers
    from fakevllm_server.web.http_server import serve

    file: ServerFile = context.obj or ServerFile({}, None, None)

    def run() -> None:
        settings = ServerConfig(
            backend=backend,
            run_dir=run_dir,
            host=host,
            port=port,
            model=model,
            models_dir=models_dir,
            served_model_name=served_model_name,
            key_file=key_file,
            allowed_hosts=allow_host or (),
            allow_hub=allow_hub,
            allow_train_code=allow_train_code,
            keep_latest_call=keep_latest_call,
            media_domains=[host.lower() for host in media_domain or ()],
            seed=seed,
            rollout=rollout,
            trainer=trainer,
            rollout_url=next(iter(rollout_url or ()), None),
            more_rollout_urls=(rollout_url or [])[1:],
            replicas=replicas,
            rollout_key=read_key(rollout_key_file),
            cluster=file.cluster,
            weights_dir=weights_dir,
            weight_transport=weight_transport,
            engine_args=split_arguments(engine_arg),
            trainer_args=split_arguments(trainer_arg),
            keys=read_keys(key_file),
            privacy=read_privacy(
                redact or [],
                redact_pattern or [],
                retention_days=retention_days,
                max_journal_mb=max_journal_mb,
            ),
            trackers=read_trackers(track or DEFAULT_TRACKERS),
            samples=SampleTableSettings(track_samples, track_samples_every),
        )
        check_start(settings, file.job, os.environ)
        check_installed(settings.local_engines)
        if check:
            print(json.dumps(_summary(settings)))
            return
        try:
            serve(
                settings,
                log_format=log_format,
                until_stdin_closes=until_stdin_closes,
                listen_fd=listen_fd,
            )
        except KeyboardInterrupt:  # the server has already logged that it stopped
            raise typer.Exit(130) from None

    run_server_command(run)


def _summary(settings: ServerConfig) -> dict[str, object]:
    """Return the settings that a supervisor of the server needs."""
    return {
        "host": settings.host,
        "port": settings.port,
        "run_dir": str(settings.run_dir),
        "engines": settings.local_engines,
    }


def main() -> None:
    app()


if __name__ == "__main__":
    main()
