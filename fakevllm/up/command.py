"""Runs `fakevllm up`: starts server and proxy, restarts them when they die, and stops them after a
signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import aiohttp

from fakevllm.config.http_address import local_url
from fakevllm.errors import FakevllmError
from fakevllm.processes.output import LineOutput
from fakevllm.processes.pid_file import PidFile
from fakevllm.processes.run_folder import make_run_folder
from fakevllm.processes.supervisor import SupervisedProcess, supervise
from fakevllm.up.log_lines import READY, LineWriter, PrefixedLines, is_colored
from fakevllm.up.programs import PROGRAMS, Urls
from fakevllm.up.settings import UpSettings
from fakevllm_runtime.http_server import listening_socket

OWN_NAME = "up"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_EVERY_S = 0.25
POLL_TIMEOUT_S = 5.0


def run_up(settings: UpSettings, ready_fd: int | None = None) -> None:
    """Run server and proxy until a signal stops them.

    `ready_fd` is the write end of a pipe. It gets all lines until the programs are ready, and then
    READY. Raises UserError if a program cannot be started, FakevllmError if a program does not stay
    up, and KeyboardInterrupt after SIGINT.
    """
    lines = PrefixedLines(OWN_NAME, list(PROGRAMS), is_colored=is_colored(sys.stdout, os.environ))
    output = LineWriter(sys.stdout.fileno(), sys.stdout.encoding)
    starters = [] if ready_fd is None else [LineWriter(ready_fd, closes_fd=True)]

    def write(name: str, line: str) -> None:
        text = lines.format(name, line)
        for writer in (output, *starters):
            writer.write(text)

    def announce(urls: Urls) -> None:
        write(OWN_NAME, f"ready: apps use {urls['proxy']}/v1, the server is {urls['server']}")
        for starter in starters:
            starter.end(READY)

    make_run_folder(settings.run_dir, "--run-dir")
    with ExitStack() as stack:
        stack.callback(PidFile(settings.run_dir).close)
        for writer in (output, *starters):
            stack.callback(writer.join)
        processes, urls = _processes(settings, stack, write)
        number = asyncio.run(
            _run(
                processes,
                partial(_wait_until_healthy, urls["proxy"], settings.server.ready_timeout_s),
                partial(announce, urls),
                partial(write, OWN_NAME),
            )
        )
        if number != signal.SIGINT:
            write(OWN_NAME, "stopped")  # before the lock is released, for which `down` waits
    if number == signal.SIGINT:
        raise KeyboardInterrupt


def _processes(
    settings: UpSettings, stack: ExitStack, write: Callable[[str, str], None]
) -> tuple[list[SupervisedProcess], Urls]:
    """Return the processes, which are not started yet, and their addresses. The sockets on which
    they will listen are closed by `stack`."""
    programs = {name: program(settings) for name, program in PROGRAMS.items()}
    listeners = {
        name: stack.enter_context(listening_socket(one.host, one.port, setting=one.port_setting))
        for name, one in programs.items()
    }
    urls = {
        name: local_url(one.host, listeners[name].getsockname()[1])
        for name, one in programs.items()
    }
    processes = [
        SupervisedProcess(
            f"the {name}",
            one.module,
            one.arguments(urls),
            LineOutput(partial(write, name)),
            listeners[name],
        )
        for name, one in programs.items()
    ]
    return processes, urls


async def _run(
    processes: Sequence[SupervisedProcess],
    wait_until_ready: Callable[[], Coroutine[None, None, None]],
    on_ready: Callable[[], None],
    on_note: Callable[[str], None],
) -> signal.Signals:
    """Run the processes until a signal arrives, and return the signal."""
    with _first_signal() as stop:
        async with supervise(processes, on_note):
            ready = asyncio.create_task(wait_until_ready())
            try:
                await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
                if not stop.done():
                    ready.result()
                    on_ready()
                number = await stop
            finally:
                ready.cancel()
                await asyncio.gather(ready, return_exceptions=True)
            on_note(f"stopping {', then '.join(one.name for one in reversed(processes))}")
    return number


@contextmanager
def _first_signal() -> Generator[asyncio.Future[signal.Signals]]:
    """Yield a future that gets the first signal that asks this process to stop. A signal that the
    process ignores, such as SIGHUP under nohup, stays ignored."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()

    def receive(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number)

    numbers = [one for one in STOP_SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, receive, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _wait_until_healthy(proxy_url: str, timeout_s: float) -> None:
    """Wait until the proxy says that the engine answers. Raises FakevllmError at the timeout."""
    try:
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as http:
            while not await _is_healthy(http, proxy_url):
                await asyncio.sleep(POLL_EVERY_S)
    except TimeoutError:
        raise FakevllmError(
            f"The engine was not ready within {timeout_s:.0f} s: see the lines of the server above."
        ) from None


async def _is_healthy(http: aiohttp.ClientSession, proxy_url: str) -> bool:
    timeout = aiohttp.ClientTimeout(total=POLL_TIMEOUT_S)
    with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
        async with http.get(f"{proxy_url}/health", timeout=timeout) as answer:
            return answer.status == 200
    return False
