"""The server, kept up, and the play in a thread beside it."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from rich.console import Console

from fakevllm.errors import FakevllmError, UserError
from fakevllm.runtime.supervisor import SupervisedProcess, make_run_folder, supervise
from fakevllm.sdk.executors import DaemonThreadPool
from fakevllm.sdk.types import SwarmError
from fakevllm.train.config import ServerSection, Settings
from fakevllm.train.play import Material, Outcome, Play
from fakevllm.train.screen import Screen

HOST = "127.0.0.1"


def train(settings: Settings, material: Material, console: Console) -> Outcome:
    """Raises UserError for what the user can mend, KeyboardInterrupt once all is saved."""
    try:
        return asyncio.run(_train(settings, material, console))
    except UserError:
        raise
    except (FakevllmError, SwarmError) as error:
        told, log_file = str(error), settings.run_dir and settings.run_dir / "server.log"
        is_told = log_file is None or str(log_file) in told
        raise UserError(told if is_told else f"{told} (see {log_file})") from error


async def _train(settings: Settings, material: Material, console: Console) -> Outcome:
    with Screen(console, material.num_steps) as screen:
        async with _server(settings, material.job.seed, screen) as url:
            play = Play(url, material, screen, settings.run_dir)
            playing = DaemonThreadPool(1).submit(play.run)
            try:
                return await asyncio.wrap_future(playing)
            except asyncio.CancelledError:
                screen.phase("stopping and saving")
                raise
            finally:
                play.stop()
                # what its threads still say is of a server that ends
                logging.getLogger("fakevllm.sdk").setLevel(logging.CRITICAL)


@asynccontextmanager
async def _server(settings: Settings, seed: int, screen: Screen) -> AsyncGenerator[str]:
    """Its URL: one that runs already, or one of our own until the block ends."""
    if settings.server.url is not None:
        yield settings.server.url
        return
    folder = settings.run_dir
    assert folder is not None, "a server of our own has a run directory"
    make_run_folder(folder, "server.run_dir")
    with _listening(settings.server.port) as listener:
        port = listener.getsockname()[1]
        flags = _flags(settings.server, folder, port, seed)
        log_file = folder / "server.log"
        server = SupervisedProcess("the server", "fakevllm_server", flags, log_file, listener)
        async with supervise([server], screen.line):
            yield f"http://{HOST}:{port}"


def _flags(server: ServerSection, folder: Path, port: int, seed: int) -> list[str]:
    model = ["--model", server.model] if server.model is not None else []
    flags = ["start", "--backend", server.backend, *model, "--run-dir", str(folder)]
    return [*flags, "--port", str(port), "--seed", str(seed), *server.flags]


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise UserError(
            f"Nobody can listen on port {port} ({os.strerror(error.errno or 0)}): name another "
            "server.port, or 0."
        ) from None
