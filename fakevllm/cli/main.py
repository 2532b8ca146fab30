"""`fakevllm`: the command line. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fakevllm.cli import control as proxy_commands
from fakevllm.cli import keys as keys_command
from fakevllm.cli import overwatch, tokens
from fakevllm.cli.control import ProxyKey, ProxyUrl
from fakevllm.errors import UserError
from fakevllm.runtime.exits import run_command

app = typer.Typer(
    name="fakevllm",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # drawing the help with rich doubles the time it takes
)
app.add_typer(keys_command.app)

Hooks = Annotated[Path | None, typer.Option(help="Folder with the hook files, or one file.")]
Aliases = Annotated[list[str] | None, typer.Option(help="Further model names; '*' is any.")]
Rows = Annotated[Path | None, typer.Option(help="JSONL rows that requests may quote.")]
FallbackKey = Annotated[
    str | None, typer.Option(envvar="FAKEVLLM_FALLBACK_KEY", help="Our key there.")
]
AppCommand = Annotated[
    str | None,
    typer.Option("--app", help="An app to run per row: {question} in its arguments, else stdin."),
]
ServePolicy = Annotated[
    Literal["best", "lead", "greedy"] | None, typer.Option(help="Which sibling the app gets.")
]
LogFormat = Annotated[
    Literal["human", "json"], typer.Option(help="Lines for people, or one JSON object a line.")
]
State = Annotated[Path | None, typer.Option(help="Where done rows are noted, to resume.")]
Lockstep = Annotated[
    bool, typer.Option("--lockstep", help="Two runs of one seed are the same, to the bit.")
]


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"fakevllm {version('fakevllm')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_tell_version, help="Show the version."),
    ] = False,
) -> None:
    """Trains the model behind your app on the app's own traffic."""


@app.command()
def serve(
    config: keys_command.ConfigFile = None,
    hooks: Hooks = None,
    swarm: Annotated[str | None, typer.Option(help="URL of the swarm server.")] = None,
    swarm_key: tokens.SwarmKey = None,
    n: Annotated[int | None, typer.Option(help="Siblings per request.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where the ledger lies.")] = None,
    alias: Aliases = None,
    dataset: Rows = None,
    field: Annotated[str | None, typer.Option(help="The dataset's text field.")] = None,
    serve_policy: ServePolicy = None,
    key_file: Annotated[Path | None, typer.Option(help="API keys of apps; see `keys`.")] = None,
    fallback: Annotated[
        str | None, typer.Option(help="URL of a server that answers while ours is away.")
    ] = None,
    fallback_key: FallbackKey = None,
    lockstep: Lockstep = False,
    log_format: LogFormat = "human",
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
    listen_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the proxy: point an app's OPENAI_BASE_URL at it."""

    def run() -> None:
        from fakevllm.config.model import load
        from fakevllm.web.app import serve as run_proxy

        flags = {
            "proxy": {"host": host, "port": port, "run_dir": run_dir, "key_file": key_file},
            "swarm": {"url": swarm, "key": swarm_key},
            "hooks": {"path": hooks},
            "models": {"aliases": alias},
            "dataset": {"file": dataset, "field": field},
            "fallback": {"url": fallback, "key": fallback_key},
            "serve": {"policy": serve_policy},
            "job": {"num_repeat": n, "lockstep": lockstep or None},
        }
        settings = load(config, flags)
        run_proxy(
            settings,
            log_format=log_format,
            until_stdin_closes=until_stdin_closes,
            listen_fd=listen_fd,
        )

    run_command(run)


@app.command("check-hook")
def check_hook(
    path: Annotated[Path, typer.Argument(help="Folder with the hook files, or one file.")],
    ledger: Annotated[
        Path | None, typer.Option(help="Check on this ledger's latest group.")
    ] = None,
) -> None:
    """Run both hooks on a group, and show what they say. It is recorded or made up."""

    def run() -> None:
        import asyncio

        from rich.console import Console

        from fakevllm.hooks.check import check, render
        from fakevllm.ledger.store import Ledger

        group = None
        if ledger is not None:
            if not ledger.exists():
                raise UserError(f"The ledger {ledger} does not exist.")
            store = Ledger.open(ledger)
            group = store.latest_group()
            store.close()
        report = asyncio.run(check(path, group))
        Console().print(render(report))
        if not report.ok:
            raise typer.Exit(1)

    run_command(run)


@app.command()
def sessions(
    session: Annotated[
        str | None, typer.Argument(help="One session's tree: the beginning of its id.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Of the latest sessions.")] = 30,
    run_dir: Annotated[Path | None, typer.Option(help="The proxy's.")] = None,
    config: keys_command.ConfigFile = None,
) -> None:
    """Show the conversations behind the requests. Each request is a turn of one."""

    def run() -> None:
        from rich.console import Console

        from fakevllm.cli.sessions import show
        from fakevllm.config.key_file import KeyFile
        from fakevllm.config.model import load

        settings = load(config, {"proxy": {"run_dir": run_dir}})
        keys = KeyFile(settings.key_file).entries() if settings.key_file.exists() else []
        names = {key.fingerprint: key.name for key in keys if key.name}
        Console().print(show(settings.ledger_file, session, limit, names))

    run_command(run)


@app.command()
def replay(
    dataset: Annotated[Path, typer.Option(help="JSON Lines, one row a user.")],
    field: Annotated[str, typer.Option(help="The row's text field.")] = "question",
    url: ProxyUrl = None,
    app_command: AppCommand = None,
    model: Annotated[str | None, typer.Option(help="Default: the first the proxy lists.")] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Rows at a time: 8, or 1 in lockstep.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first rows.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Times through the dataset.")] = 1,
    max_tokens: Annotated[int | None, typer.Option(help="Limit of one answer.")] = None,
    state: State = None,
    fresh: Annotated[bool, typer.Option(help="Forget what was done before.")] = False,
    key: ProxyKey = None,
    lockstep: Annotated[
        bool,
        typer.Option("--lockstep", help="Row after row, before a proxy that runs with --lockstep."),
    ] = False,
    config: keys_command.ConfigFile = None,
) -> None:
    """Play the user: send a dataset through the proxy, row by row."""

    def run() -> None:
        from fakevllm.replay.command import ReplaySettings, run_replay

        settings = ReplaySettings(
            dataset,
            field,
            proxy_commands.proxy_url(url, config),
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
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 150,
    seed: Annotated[int, typer.Option(help="Of data and sampling.")] = 0,
    control: Annotated[
        Literal["none", "frozen", "shuffled"], typer.Option(help="What must not learn.")
    ] = "none",
    run_dir: Annotated[
        Path | None, typer.Option(help="Resumes where it has been used before.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here.")] = None,
    backend: Annotated[
        str, typer.Option(help="A pair of engines: embedded | vllm | verl | fake.")
    ] = "embedded",
    rollout: Annotated[
        str | None, typer.Option(help="Samples, instead of the pair's: embedded | vllm.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(help="Trains, instead of the pair's: embedded | verl.")
    ] = None,
    lockstep: Lockstep = False,
) -> None:
    """Train a tiny model and watch it get better. All processes are the real ones."""

    def run() -> None:
        from fakevllm.demo.command import DemoSettings, run_demo
        from fakevllm.runtime.engine_choice import EngineChoice

        engines = EngineChoice.resolve(backend, rollout, trainer)
        run_demo(DemoSettings(steps, seed, control, run_dir, json_file, engines, lockstep))

    run_command(run)


@app.command()
def train(
    conf: Annotated[
        Path, typer.Option(help="YAML: the job, the workflow, the dataset, the server.")
    ],
) -> None:
    """Train a workflow function on a dataset. Server, agent and trainer in one command."""

    def run() -> None:
        from fakevllm.train.command import run_train

        run_train(conf)

    run_command(run)


for command in (
    proxy_commands.status,
    proxy_commands.pause,
    proxy_commands.resume,
    tokens.tokens,
    overwatch.overwatch,
):
    app.command()(command)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
