"""Runs `fakevllm up`: starts server and proxy, restarts them when they die, and stops them after a
signal."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import aiohttp

from fakevllm.config.http_address import local_url
from fakevllm.errors import FakevllmError
from fakevllm.processes.output import LineOutput
from fakevllm.processes.pid_file import PidFile
from fakevllm.processes.run_folder import make_run_folder
from fakevllm.processes.supervisor import SupervisedProcess, supervise
from fakevllm.up.log_lines import LineWriter, PrefixedLines, is_colored
from fakevllm.up.settings import SERVER_MODULE, UpSettings
from fakevllm_runtime.http_server import listening_socket

OWN_NAME = "up"
PROGRAMS = ("server", "proxy")
"""Names of the programs in the order of their start. They are stopped in the opposite order."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_EVERY_S = 0.25
POLL_TIMEOUT_S = 5.0
READY = b"\0\n"
"""Line in the pipe of `--ready-fd` that says that all programs are ready. No program writes this
line, because control characters are replaced."""


def run_up(settings: UpSettings, ready_fd: int | None = None) -> None:
    """Run server and proxy until a signal stops them.

    `ready_fd` is the write end of a pipe. It gets all lines until the programs are ready, and then
    READY. Raises UserError if a program cannot be started, FakevllmError if a program does not stay
    up, and KeyboardInterrupt after SIGINT.
    """
    lines = PrefixedLines(OWN_NAME, PROGRAMS, is_colored=is_colored(sys.stdout, os.environ))
    writer = LineWriter(sys.stdout)
    if ready_fd is not None:
        writer.copy_to(ready_fd)

    def write(name: str, line: str) -> None:
        writer.write(lines.format(name, line))

    make_run_folder(settings.run_dir, "--run-dir")
    with ExitStack() as stack:
        stack.callback(PidFile(settings.run_dir).close)
        server, proxy = settings.server, settings.config.proxy
        server_listener, proxy_listener = (
            stack.enter_context(listening_socket(host, port, setting=setting))
            for host, port, setting in (
                (server.host, server.port, "port in [server]"),
                (proxy.host, proxy.port, "proxy.port"),
            )
        )
        stack_urls = [
            local_url(host, listener.getsockname()[1])
            for host, listener in ((server.host, server_listener), (proxy.host, proxy_listener))
        ]
        programs = _programs(settings, server_listener, proxy_listener, stack_urls[0], write)
        number = asyncio.run(
            _run(
                programs,
                stack_urls[1],
                settings.server.ready_timeout_s,
                partial(_announce, stack_urls, write, writer),
                partial(write, OWN_NAME),
            )
        )
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    write(OWN_NAME, "stopped")


def _programs(
    settings: UpSettings,
    server_listener: socket.socket,
    proxy_listener: socket.socket,
    server_url: str,
    write: Callable[[str, str], None],
) -> list[SupervisedProcess]:
    port = str(server_listener.getsockname()[1])
    arguments = {
        "server": (SERVER_MODULE, [*settings.server_flags, "--port", port], server_listener),
        "proxy": (
            "fakevllm",
            ["serve", *settings.proxy_flags, "--swarm", server_url],
            proxy_listener,
        ),
    }
    return [
        SupervisedProcess(f"the {name}", module, flags, LineOutput(partial(write, name)), listener)
        for name, (module, flags, listener) in arguments.items()
    ]


def _announce(urls: Sequence[str], write: Callable[[str, str], None], writer: LineWriter) -> None:
    server_url, proxy_url = urls
    write(OWN_NAME, f"ready: apps use {proxy_url}/v1, the server is {server_url}")
    writer.end_copy(READY)


async def _run(
    programs: Sequence[SupervisedProcess],
    proxy_url: str,
    timeout_s: float,
    on_ready: Callable[[], None],
    on_note: Callable[[str], None],
) -> signal.Signals:
    """Run the programs until a signal arrives, and return the signal."""
    with _first_signal() as stop:
        async with supervise(programs, on_note):
            ready = asyncio.create_task(_wait_until_healthy(proxy_url, timeout_s))
            try:
                await asyncio.wait((ready, stop), return_when=asyncio.FIRST_COMPLETED)
                if not stop.done():
                    ready.result()
                    on_ready()
                number = await stop
            finally:
                ready.cancel()
                await asyncio.gather(ready, return_exceptions=True)
            on_note("stopping the proxy, and then the server")
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
