"""The commands `fakevllm release …`, which show and change the versions that may answer apps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fakevllm.cli.options import ConfigFile, SwarmKey
from fakevllm_runtime.commands import run_command

if TYPE_CHECKING:
    from rich.console import RenderableType

    from fakevllm.sdk.release_requests import ReleaseRequests

app = typer.Typer(
    name="release",
    help="Show which versions may answer apps, release one, or go back.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SwarmUrl = Annotated[
    str | None,
    typer.Option(
        "--swarm", help="URL of the swarm server. Default: the address in the configuration file."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Version = Annotated[int, typer.Argument(min=0, help="Version of the weights.")]


@app.command()
def status(
    swarm: SwarmUrl = None,
    swarm_key: SwarmKey = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """Show the released version, the candidate and the rejected versions.

    The candidate is the version that is being evaluated.
    """

    def run() -> None:
        from fakevllm.cli.release_table import status_json, status_table

        with _server(swarm, swarm_key, config) as server:
            history = server.history()
            _show(status_json(history) if as_json else status_table(server.url, history))

    run_command(run)


@app.command()
def history(
    swarm: SwarmUrl = None,
    swarm_key: SwarmKey = None,
    as_json: AsJson = False,
    config: ConfigFile = None,
) -> None:
    """List all decisions about versions, with their figures."""

    def run() -> None:
        from fakevllm.cli.release_table import history_json, history_table

        with _server(swarm, swarm_key, config) as server:
            records = server.history().records
            _show(history_json(records) if as_json else history_table(records))

    run_command(run)


@app.command()
def promote(
    version: Version,
    force: Annotated[
        bool, typer.Option("--force", help="Release the version although it was rejected.")
    ] = False,
    swarm: SwarmUrl = None,
    swarm_key: SwarmKey = None,
    config: ConfigFile = None,
) -> None:
    """Release a version without an evaluation. In the mode `gated`, the released version answers
    apps, unless `release.evaluation` is "between_steps". In that case, the newest version answers
    apps."""

    def run() -> None:
        with _server(swarm, swarm_key, config) as server:
            record = server.promote(version, force=force)
            print(f"Version {record.version} is released (decision {record.number}).")

    run_command(run)


@app.command()
def rollback(
    version: Annotated[
        int | None,
        typer.Argument(min=0, help="Version to go back to. Default: the released one."),
    ] = None,
    swarm: SwarmUrl = None,
    swarm_key: SwarmKey = None,
    config: ConfigFile = None,
) -> None:
    """Let training go back to a version. All versions that were trained from this version are
    rejected, and never answer apps again. If the released version is rejected, the version that was
    released before it answers apps."""

    def run() -> None:
        with _server(swarm, swarm_key, config) as server:
            record = server.roll_back(version)
            restored = record.evidence.get("restored", "the released one")
            print(
                f"Training goes on from version {restored}. {_rejected(record.version, restored)} "
                f"(decision {record.number})."
            )
            released = server.history().released
            note = "" if released == restored else f", not version {restored}"
            print(f"In the mode `gated`, version {released} is released now{note}.")

    run_command(run)


@app.command()
def hold(swarm: SwarmUrl = None, swarm_key: SwarmKey = None, config: ConfigFile = None) -> None:
    """Stop releases until `fakevllm release resume`. Meanwhile, no new version is evaluated. The
    candidate (the version that is being evaluated already) may still be rejected."""

    def run() -> None:
        with _server(swarm, swarm_key, config) as server:
            server.hold()
            print("Releases are on hold: no version is released until `fakevllm release resume`.")

    run_command(run)


@app.command()
def resume(swarm: SwarmUrl = None, swarm_key: SwarmKey = None, config: ConfigFile = None) -> None:
    """End the stop of `fakevllm release hold`, so that versions are evaluated and released
    again."""

    def run() -> None:
        with _server(swarm, swarm_key, config) as server:
            was_held = server.history().is_held
            server.resume()
            print(f"Releases {'are no longer' if was_held else 'were not'} on hold.")

    run_command(run)


def _show(output: RenderableType) -> None:
    """Print JSON as it is, and a table in the width of the terminal."""
    from rich.console import Console

    if isinstance(output, str):
        print(output)
    else:
        Console().print(output)


def _rejected(first: int | None, restored: object) -> str:
    """Return a text that says which versions a rollback has rejected. `first` is the oldest
    rejected version. It is newer than `restored`, the version to which training went back. `first`
    is None if training had already gone back to a version before `restored`.

    >>> _rejected(8, 7)
    'Version 8 and all that were trained from it are rejected'
    """
    if first is None:
        return f"All versions that were trained from version {restored} are rejected"
    return f"Version {first} and all that were trained from it are rejected"


def _server(swarm: str | None, key: str | None, config: Path | None) -> ReleaseRequests:
    """Return a client of the server that the flags or the configuration name. Raises UserError if a
    flag or the configuration is not valid."""
    from fakevllm.config.model import load
    from fakevllm.sdk.release_requests import ReleaseRequests

    section = load(config, {"swarm": {"url": swarm, "key": key}}).swarm
    return ReleaseRequests(section.url, section.key)
