"""Run one training: keep the server running as a supervised child process, and run the rollout loop
in a thread."""

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
from fakevllm.processes.output import LogFile
from fakevllm.processes.run_folder import make_run_folder
from fakevllm.processes.supervisor import SupervisedProcess, supervise
from fakevllm.sdk.episode_executors import DaemonThreadPool
from fakevllm.sdk.types import SwarmError
from fakevllm.train.config import ServerSection, Settings
from fakevllm.train.progress_display import ProgressDisplay
from fakevllm.train.rollout_loop import Outcome, RolloutLoop
from fakevllm.train.training_inputs import TrainingInputs

HOST = "127.0.0.1"


def train(settings: Settings, inputs: TrainingInputs, console: Console) -> Outcome:
    """Run the training until its last step, and return the mean rewards of the steps and of the
    evaluations.

    Raises UserError if training cannot begin or continue. Raises KeyboardInterrupt on Ctrl-C, after
    the server has saved a checkpoint.
    """
    try:
        return asyncio.run(_train(settings, inputs, console))
    except UserError:
        raise
    except (FakevllmError, SwarmError) as error:
        text = str(error)
        log_file = None if settings.run_dir is None else settings.run_dir / "server.log"
        names_log = log_file is None or str(log_file) in text
        raise UserError(text if names_log else f"{text} (see {log_file})") from error


async def _train(settings: Settings, inputs: TrainingInputs, console: Console) -> Outcome:
    with ProgressDisplay(console, inputs.num_steps) as display:
        async with _server_url(settings, inputs.job.seed, display) as url:
            loop = RolloutLoop(url, inputs, display, settings.run_dir)
            result = DaemonThreadPool(1).submit(loop.run)
            try:
                return await asyncio.wrap_future(result)
            except asyncio.CancelledError:
                display.show_phase("stopping and saving")
                raise
            finally:
                loop.stop()
                # The loop's threads would still log errors about the server that is being stopped.
                logging.getLogger("fakevllm.sdk").setLevel(logging.CRITICAL)


@asynccontextmanager
async def _server_url(
    settings: Settings, seed: int, display: ProgressDisplay
) -> AsyncGenerator[str]:
    """Yield the server's URL. If the YAML file names no server, start a server, and stop it when
    the block ends."""
    if settings.server.url is not None:
        yield settings.server.url
        return
    folder = settings.run_dir
    assert folder is not None, "a server that this command starts has a run directory"
    make_run_folder(folder, "server.run_dir")
    with _listening_socket(settings.server.port) as listener:
        port = listener.getsockname()[1]
        flags = _server_flags(settings.server, folder, port, seed)
        log = LogFile(folder / "server.log")
        server = SupervisedProcess("the server", "fakevllm_server", flags, log, listener)
        async with supervise([server], display.print_line):
            yield f"http://{HOST}:{port}"


def _server_flags(server: ServerSection, folder: Path, port: int, seed: int) -> list[str]:
    model = ["--model", server.model] if server.model is not None else []
    flags = ["start", "--backend", server.backend, *model, "--run-dir", str(folder)]
    return [*flags, "--port", str(port), "--seed", str(seed), *server.flags]


def _listening_socket(port: int) -> socket.socket:
    """Return a socket that listens on `port`, or on any free port if `port` is 0. Raises UserError
    if the port cannot be used."""
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise UserError(
            f"The server cannot listen on port {port} ({os.strerror(error.errno or 0)}): name "
            "another port in server.port, or 0 for any free port."
        ) from None
