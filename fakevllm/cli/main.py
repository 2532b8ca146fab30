"""The command line `fakevllm` with all its commands. The code of a command is imported when the
command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fakevllm.cli import (
    console,
    control,
    evaluate,
    export,
    forget,
    import_logs,
    init,
    keys,
    overwatch,
    release,
    rescore,
    retrain,
    tokens,
    up,
)
from fakevllm.cli import hooks as hook_commands
from fakevllm.cli.options import (
    ConfigFile,
    EnginePair,
    ProxyKey,
    ProxyUrl,
    RolloutEngine,
    RunDir,
    SwarmKey,
    Trainer,
    TrainerArguments,
)
from fakevllm.errors import UserError
from fakevllm_runtime.commands import run_command

app = typer.Typer(
    name="fakevllm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would double the time of --help
)
app.add_typer(keys.app)
app.add_typer(release.app)
app.add_typer(hook_commands.app)

Hooks = Annotated[Path | None, typer.Option(help="Folder with the hook files, or one file.")]
Aliases = Annotated[
    list[str] | None,
    typer.Option(help="Further model name that apps may use; '*' accepts any name."),
]
Rows = Annotated[
    Path | None, typer.Option(help="JSON Lines file with the rows that requests quote.")
]
FallbackKey = Annotated[
    str | None,
    typer.Option(envvar="FAKEVLLM_FALLBACK_KEY", help="API key for the fallback server."),
]
AppCommand = Annotated[
    str | None,
    typer.Option(
        "--app",
        help="Command to run for each row instead of sending requests. {question} in its arguments "
        "is replaced by the row's text; without it, the text is its standard input.",
    ),
]
ServePolicy = Annotated[
    Literal["best", "lead", "greedy"] | None, typer.Option(help="Which answer the app gets.")
]
LogFormat = Annotated[
    Literal["human", "json"],
    typer.Option(help="human: readable lines. json: one JSON object per line."),
]
State = Annotated[
    Path | None,
    typer.Option(
        help="File that records which rows are done. Default: .fakevllm/replay-NAME.jsonl."
    ),
]
Lockstep = Annotated[
    bool, typer.Option("--lockstep", help="Make two runs with one seed identical to the bit.")
]


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        print(f"fakevllm {version('fakevllm')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Train the model behind your app on the app's own traffic."""


@app.command()
def serve(
    config: ConfigFile = None,
    hooks: Hooks = None,
    swarm: Annotated[str | None, typer.Option(help="URL of the swarm server.")] = None,
    swarm_key: SwarmKey = None,
    n: Annotated[int | None, typer.Option(help="Number of siblings (samples) per request.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    run_dir: RunDir = None,
    alias: Aliases = None,
    dataset: Rows = None,
    field: Annotated[str | None, typer.Option(help="Text field of the rows.")] = None,
    serve_policy: ServePolicy = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the API keys of apps; see `keys`.")
    ] = None,
    fallback: Annotated[
        str | None,
        typer.Option(help="URL of a server that answers while the engine is unavailable."),
    ] = None,
    fallback_key: FallbackKey = None,
    watch_hooks: Annotated[
        bool, typer.Option("--watch-hooks", help="Reload the hooks when a hook file is edited.")
    ] = False,
    lockstep: Lockstep = False,
    log_format: LogFormat = "human",
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
    listen_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the proxy. Set an app's OPENAI_BASE_URL to the proxy's address."""

    def run() -> None:
        import os

        from fakevllm.config.model import load, source_file
        from fakevllm.config.setting_origins import sources_of
        from fakevllm.web.app import serve as run_proxy

        flags = {
            "proxy": {"host": host, "port": port, "run_dir": run_dir, "key_file": key_file},
            "swarm": {"url": swarm, "key": swarm_key},
            "hooks": {"path": hooks, "watch": watch_hooks or None},
            "models": {"aliases": alias},
            "dataset": {"file": dataset, "field": field},
            "fallback": {"url": fallback, "key": fallback_key},
            "serve": {"policy": serve_policy},
            "job": {"num_repeat": n, "lockstep": lockstep or None},
        }
        settings = load(config, flags)
        run_proxy(
            settings,
            sources=sources_of(source_file(config), flags, os.environ),
            log_format=log_format,
            until_stdin_closes=until_stdin_closes,
            listen_fd=listen_fd,
        )

    run_command(run)


@app.command("check-hook")
def check_hook(
    path: Annotated[Path, typer.Argument(help="Folder with the hook files, or one file.")],
    ledger: Annotated[
        Path | None,
        typer.Option(help="Ledger whose latest group is used. Default: a made-up group."),
    ] = None,
    config: ConfigFile = None,
) -> None:
    """Run all hooks once and show their results. The hooks get one request with several answers."""

    def run() -> None:
        import asyncio

        from rich.console import Console

        from fakevllm.config.model import load
        from fakevllm.hooks.check import check, render
        from fakevllm.hooks.sandbox import HookSandbox

        group = None
        if ledger is not None:
            from fakevllm.ledger.offline_copy import offline_ledger
            from fakevllm.ledger.store import Ledger

            if not ledger.exists():
                raise UserError(f"The ledger {ledger} does not exist.")
            store = Ledger.open(offline_ledger(ledger))
            group = store.latest_group()
            store.close()
        hooks = load(config, {}).hooks
        sandbox = HookSandbox(hooks.environment, hooks.memory_mb)
        report = asyncio.run(check(path, group, sandbox=sandbox))
        Console().print(render(report))
        if not report.ok:
            raise typer.Exit(1)

    run_command(run)


@app.command()
def sessions(
    session: Annotated[
        str | None,
        typer.Argument(
            help="Session to draw, by the beginning of its id. Default: list the sessions."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of sessions to list.")] = 30,
    run_dir: RunDir = None,
    config: ConfigFile = None,
) -> None:
    """List sessions, or draw one session as a tree. A session is one conversation of an app."""

    def run() -> None:
        from rich.console import Console

        from fakevllm.cli.sessions import render
        from fakevllm.config.key_file import KeyFile
        from fakevllm.config.model import load

        settings = load(config, {"proxy": {"run_dir": run_dir}})
        app_keys = KeyFile(settings.key_file).entries() if settings.key_file.exists() else []
        names = {key.fingerprint: key.name for key in app_keys if key.name}
        Console().print(render(settings.ledger_file, session, limit, names))

    run_command(run)


@app.command()
def replay(
    dataset: Annotated[Path, typer.Option(help="JSON Lines file with one question per row.")],
    field: Annotated[str, typer.Option(help="Text field of the rows.")] = "question",
    url: ProxyUrl = None,
    app_command: AppCommand = None,
    model: Annotated[
        str | None, typer.Option(help="Model to request. Default: the first that the proxy lists.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Rows at the same time. Default: 8, or 1 in lockstep.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Send only this many rows, the first ones.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes through the dataset.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum tokens of one answer.")] = None,
    state: State = None,
    fresh: Annotated[bool, typer.Option(help="Forget which rows were done before.")] = False,
    key: ProxyKey = None,
    lockstep: Annotated[
        bool,
        typer.Option("--lockstep", help="Send row after row; the proxy must run with --lockstep."),
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Send a dataset through the proxy, row by row."""

    def run() -> None:
        from fakevllm.replay.command import ReplaySettings, run_replay

        settings = ReplaySettings(
            dataset,
            field,
            control.proxy_url(url, config),
            app_command,
            model,
            concurrency,
            limit,
            epochs,
            max_tokens,
            state,
            fresh,
            key,
            lockstep,
        )
        if not run_replay(settings):
            raise typer.Exit(1)

    run_command(run)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 150,
    seed: Annotated[int, typer.Option(help="Random seed for data order and sampling.")] = 0,
    control: Annotated[
        Literal["none", "frozen", "shuffled"],
        typer.Option(help="Control experiment, which must not learn."),
    ] = "none",
    run_dir: Annotated[
        Path | None,
        typer.Option(readable=False, help="Folder for all files. A run in it is resumed."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the run's numbers to this file.")
    ] = None,
    backend: EnginePair = "embedded",
    rollout: RolloutEngine = None,
    trainer: Trainer = None,
    trainer_arg: TrainerArguments = None,
    lockstep: Lockstep = False,
    async_steps: Annotated[
        int,
        typer.Option(min=0, max=4, help="Batches collected ahead of the running training step."),
    ] = 0,
    gated: Annotated[
        bool,
        typer.Option("--gated", help="Evaluate versions on held-out sums before they answer."),
    ] = False,
    plant_bad_step: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --gated: from this step on, train ten steps with the opposite rewards, and "
            "check that the released answers do not suffer.",
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            help="Where curves are written: tensorboard | wandb. Default: tensorboard, if it is "
            "installed."
        ),
    ] = None,
    track_samples: Annotated[
        int,
        typer.Option(min=0, help="Groups in each table of sampled answers; 0: no tables."),
    ] = 0,
    track_samples_every: Annotated[
        int, typer.Option(min=1, help="Steps between two tables of sampled answers.")
    ] = 10,
) -> None:
    """Train the included demo model. The demo starts the same processes as a real run."""

    def run() -> None:
        from fakevllm.config.model import TrackingSection
        from fakevllm.demo.command import DemoSettings, run_demo
        from fakevllm.demo.gate_settings import PlantedSteps
        from fakevllm.runtime.local_engines import EngineChoice

        engines = EngineChoice.resolve(backend, rollout, trainer)
        settings = DemoSettings(
            steps,
            seed,
            control,
            run_dir,
            json_file,
            engines,
            lockstep,
            is_gated=gated,
            planted=None if plant_bad_step is None else PlantedSteps(plant_bad_step),
            tracking=TrackingSection(
                to=tuple(track or TrackingSection().to),
                samples=track_samples,
                samples_every=track_samples_every,
            ),
            trainer_args=tuple(trainer_arg or ()),
            async_steps=async_steps,
        )
        if run_demo(settings).failed_claims:
            raise typer.Exit(1)

    run_command(run)


@app.command()
def train(
    conf: Annotated[
        Path, typer.Option(help="YAML file with the job, the workflow, the dataset and the server.")
    ],
) -> None:
    """Train a model with your workflow function on a dataset."""

    def run() -> None:
        from fakevllm.train.command import run_train

        run_train(conf)

    run_command(run)


for command in (
    up.up,
    up.down,
    console.console,
    init.init,
    control.status,
    control.pause,
    control.resume,
    tokens.tokens,
    rescore.rescore,
    forget.forget,
    retrain.retrain,
    export.export,
    overwatch.overwatch,
):
    app.command()(command)
app.command("import")(import_logs.import_logs)
app.command("eval")(evaluate.evaluate)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
