"""`fakevllm-server`: the command line. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fakevllm_server.cli import checkpoints, curves
from fakevllm_server.cli.exits import run_server_command

app = typer.Typer(
    name="fakevllm-server",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # drawing the help with rich doubles the time it takes
)
app.add_typer(checkpoints.app)
app.command()(curves.curves)


NOT_IN_A_FILE = ("config", "until_stdin_closes", "listen_fd")


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"fakevllm-server {version('fakevllm')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_tell_version, help="Show the version."),
    ] = False,
) -> None:
    """The swarm server: owns the engine, captures every call, trains the model."""


def _take_file(context: typer.Context, file: Path | None) -> Path | None:
    """Its values become the defaults of the other flags, so that the command line wins."""
    if file is None:
        return None
    from fakevllm_server.config.file import flag_types, read

    flags = {name: kind for name, kind in flag_types(start).items() if name not in NOT_IN_A_FILE}

    def load() -> None:
        context.default_map = read(file, flags)

    run_server_command(load)
    return file


@app.command()
def start(
    config: Annotated[
        Path | None,
        typer.Option(
            callback=_take_file, is_eager=True, help="YAML with these flags; those given here win."
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="A pair of engines: embedded | vllm | verl | fake.")
    ] = "embedded",
    rollout: Annotated[
        str | None, typer.Option(help="Samples, instead of the pair's: embedded | vllm | fake.")
    ] = None,
    trainer: Annotated[
        str | None, typer.Option(help="Trains, instead of the pair's: embedded | verl | fake.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model folder, or `demo`; wins over the job's.")
    ] = None,
    run_dir: Annotated[
        Path, typer.Option(help="Checkpoints, logs and the engine's socket.")
    ] = Path("runs/default"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 10086,
    served_model_name: Annotated[
        str | None, typer.Option(help="Default: the folder's name.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="One API key a line.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="Further names in `Host`.")] = None,
    allow_hub: Annotated[bool, typer.Option(help="Let --model be a hub name.")] = False,
    allow_train_code: Annotated[
        bool, typer.Option(help="Keep what clients send as training code; it is never run.")
    ] = False,
    keep_latest_call: Annotated[
        bool,
        typer.Option(help="Keep the latest call for /replay_latest_llm_call (debugging)."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the engine.")] = 0,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="Passed to the rollout engine as is.")
    ] = None,
    trainer_arg: Annotated[
        list[str] | None, typer.Option(help="Passed to a trainer with a process of its own.")
    ] = None,
    rollout_url: Annotated[
        str | None, typer.Option(help="A vLLM that runs already; none is started.")
    ] = None,
    rollout_key_file: Annotated[Path | None, typer.Option(help="Its API key, in a file.")] = None,
    weights_dir: Annotated[
        Path | None, typer.Option(help="Folder shared with that vLLM; default: in memory.")
    ] = None,
    log_format: Annotated[
        Literal["human", "json"], typer.Option(help="Lines for people, or one JSON object a line.")
    ] = "human",
    until_stdin_closes: Annotated[bool, typer.Option(hidden=True)] = False,
    listen_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Start the server. A client's job starts the engine."""
    from fakevllm_server.config.model import ServerConfig, read_key, read_keys
    from fakevllm_server.web.http_server import serve

    def run() -> None:
        settings = ServerConfig(
            backend=backend,
            run_dir=run_dir,
            host=host,
            port=port,
            model=model,
            served_model_name=served_model_name,
            key_file=key_file,
            allowed_hosts=allow_host or (),
            allow_hub=allow_hub,
            allow_train_code=allow_train_code,
            keep_latest_call=keep_latest_call,
            seed=seed,
            rollout=rollout,
            trainer=trainer,
            rollout_url=rollout_url,
            rollout_key=read_key(rollout_key_file),
            weights_dir=weights_dir,
            engine_args=_parts(engine_arg),
            trainer_args=_parts(trainer_arg),
            keys=read_keys(key_file),
        )
        serve(
            settings,
            log_format=log_format,
            until_stdin_closes=until_stdin_closes,
            listen_fd=listen_fd,
        )

    run_server_command(run)


def _parts(arguments: list[str] | None) -> list[str]:
    """`--flag=value` as two; a value of its own stays whole."""
    return [
        part
        for argument in arguments or ()
        for part in (argument.split("=", 1) if argument.startswith("--") else [argument])
    ]


def main() -> None:
    app()


if __name__ == "__main__":
    main()
