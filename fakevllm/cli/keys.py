"""`fakevllm keys`: the API keys of apps, one an app. Nothing heavy is imported before a command
runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fakevllm.errors import ConfigError
from fakevllm.runtime.exits import run_command
from fakevllm_adapters.protocol.keys import Role

if TYPE_CHECKING:
    from rich.table import Table

    from fakevllm.config.key_file import KeyFile
    from fakevllm_adapters.protocol.keys import AppKey

app = typer.Typer(
    name="keys",
    help="API keys of apps. A running proxy follows within a second.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(help="Whose key it is, in the list.")]
File = Annotated[
    Path | None, typer.Option("--key-file", help="Default: `keys` in the run directory.")
]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="The proxy's.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Default: fakevllm.toml, where it exists.")
]
AskedRole = Annotated[
    Role, typer.Option("--role", help="client: asks and plays; admin: also starts and stops.")
]

# A proxy that runs keeps its keys when their file goes: it must be started again.
_NOBODY = (
    "It was the last: no app has a key now, and all get 401. Make one with `fakevllm keys add "
    "NAME`; or, to serve without keys again, delete {path}, name no key file, and restart "
    "`fakevllm serve`."
)


@app.command()
def add(
    name: Name,
    role: AskedRole = Role.ADMIN,
    key_file: File = None,
    run_dir: RunDir = None,
    config: ConfigFile = None,
) -> None:
    """Make a key. It is shown this once: only its SHA-256 is kept."""

    def run() -> None:
        import sys

        from fakevllm_adapters.protocol.keys import named_key, new_app_key

        file = _file(key_file, run_dir, config)
        secret = new_app_key()
        try:
            key = named_key(secret, name, _now(), role)
        except ValueError as error:
            raise ConfigError(f"{name!r} cannot be used: {error}.") from None
        file.add(key)
        print(secret)
        told = f"The key of {name} ({role}), shown this once; {file.path} keeps its hash."
        print(told, file=sys.stderr)
        if len(file.entries()) == 1:
            print("It is the first: from now on every app needs a key.", file=sys.stderr)

    run_command(run)


@app.command("list")
def list_keys(key_file: File = None, run_dir: RunDir = None, config: ConfigFile = None) -> None:
    """Show whose keys there are. Fingerprints are those that the ledger has."""

    def run() -> None:
        from rich.console import Console

        file = _file(key_file, run_dir, config)
        Console().print(_table(file.entries(), str(file.path)))

    run_command(run)


@app.command()
def revoke(
    name: Name, key_file: File = None, run_dir: RunDir = None, config: ConfigFile = None
) -> None:
    """End an app's key, for good."""

    def run() -> None:
        import sys

        file = _file(key_file, run_dir, config)
        file.revoke(name, _now())
        print(f"The key of {name} is revoked.")
        if all(key.revoked is not None for key in file.entries()):
            print(_NOBODY.format(path=file.path), file=sys.stderr)

    run_command(run)


def _file(key_file: Path | None, run_dir: Path | None, config: Path | None) -> KeyFile:
    """That of the proxy with the same flags."""
    from fakevllm.config.key_file import KeyFile
    from fakevllm.config.model import load

    flags = {"proxy": {"key_file": key_file, "run_dir": run_dir}}
    return KeyFile(load(config, flags).key_file)


def _table(keys: Sequence[AppKey], title: str) -> Table:
    from rich.table import Table

    table = Table("name", "role", "fingerprint", "created", "revoked", title=title)
    for key in keys:
        name = key.name or "(in plain text)"
        table.add_row(name, key.role, key.fingerprint, key.created or "", key.revoked or "")
    return table


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
