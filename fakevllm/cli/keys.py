"""`fakevllm keys`: create, list and revoke the API keys of apps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fakevllm.cli.options import ConfigFile, RunDir
from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.keys import Role
from fakevllm_runtime.commands import run_command

if TYPE_CHECKING:
    from rich.table import Table

    from fakevllm.config.key_file import KeyFile
    from fakevllm_adapters.protocol.keys import AppKey

app = typer.Typer(
    name="keys",
    help="Manage the API keys of apps. A running proxy reloads them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Name = Annotated[str, typer.Argument(help="Name of the key, usually the app's.")]
File = Annotated[
    Path | None,
    typer.Option("--key-file", help="The key file. Default: `keys` in the run directory."),
]
KeyRole = Annotated[
    Role,
    typer.Option(
        "--role",
        help="client: send requests and run episodes. admin: also start and stop the engine.",
    ),
]

# The restart is needed because a running proxy keeps its keys when their file is deleted.
_NO_KEY_LEFT = (
    "This was the last valid key: all apps get 401 now. Create a key with `fakevllm keys add "
    "NAME`. To serve without keys again, delete {path}, configure no key file, and restart "
    "`fakevllm serve`."
)


StoreNothing = Annotated[
    bool,
    typer.Option(
        "--store-nothing", help="Answer requests with the key, and store nothing of them."
    ),
]


@app.command()
def add(
    name: Name,
    role: KeyRole = Role.ADMIN,
    store_nothing: StoreNothing = False,
    key_file: File = None,
    run_dir: RunDir = None,
    config: ConfigFile = None,
) -> None:
    """Create a key and print it once. The key file stores only the key's SHA-256 hash."""

    def run() -> None:
        import sys

        from fakevllm_adapters.protocol.keys import named_key, new_app_key

        file = _file(key_file, run_dir, config)
        secret = new_app_key()
        try:
            key = named_key(secret, name, _now(), role, stores_nothing=store_nothing)
        except ValueError as error:
            raise ConfigError(f"{name!r} cannot be used: {error}.") from None
        file.add(key)
        print(secret)
        note = (
            f"This is the key of {name} ({role}). It is not shown again: {file.path} has its hash."
        )
        print(note, file=sys.stderr)
        if len(file.entries()) == 1:
            print("It is the first key: from now on every app needs one.", file=sys.stderr)

    run_command(run)


@app.command("list")
def list_keys(key_file: File = None, run_dir: RunDir = None, config: ConfigFile = None) -> None:
    """List all keys with their fingerprints. The ledger stores the fingerprint of an app's key."""

    def run() -> None:
        from rich.console import Console

        file = _file(key_file, run_dir, config)
        Console().print(_table(file.entries(), str(file.path)))

    run_command(run)


@app.command()
def revoke(
    name: Name, key_file: File = None, run_dir: RunDir = None, config: ConfigFile = None
) -> None:
    """Revoke a key permanently."""

    def run() -> None:
        import sys

        file = _file(key_file, run_dir, config)
        file.revoke(name, _now())
        print(f"The key of {name} is revoked.")
        if all(key.revoked is not None for key in file.entries()):
            print(_NO_KEY_LEFT.format(path=file.path), file=sys.stderr)

    run_command(run)


def _file(key_file: Path | None, run_dir: Path | None, config: Path | None) -> KeyFile:
    """Return the key file that `fakevllm serve` would use with the same flags."""
    from fakevllm.config.key_file import KeyFile
    from fakevllm.config.model import load

    flags = {"proxy": {"key_file": key_file, "run_dir": run_dir}}
    return KeyFile(load(config, flags).key_file)


def _table(keys: Sequence[AppKey], title: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "role", "store", "fingerprint", "created", "revoked", title=Text(title))
    for key in keys:
        name = key.name or "(in plain text)"
        store = "nothing" if key.stores_nothing else "all"
        created, revoked = key.created or "", key.revoked or ""
        table.add_row(Text(name), key.role, store, key.fingerprint, created, revoked)
    return table


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
