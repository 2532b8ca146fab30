"""Runs `fakevllm up`: starts its programs, restarts them when they die, and stops them after a
signal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from fakevllm.config.http_address import local_url
from fakevllm.processes.output import LineOutput
from fakevllm.processes.pid_file import PidFile
from fakevllm.processes.run_folder import make_run_folder
from fakevllm.processes.supervisor import SupervisedProcess, supervise
from fakevllm.up.log_lines import READY, LineWriter, PrefixedLines, is_colored, standard_output
from fakevllm.up.programs import PROGRAMS, Urls, programs_of
from fakevllm.up.readiness import wait_until_ready
from fakevllm.up.settings import UpSettings
from fakevllm_runtime.http_server import listening_socket

OWN_NAME = "up"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_up(settings: UpSettings, ready_fd: int | None = None) -> None:
    """Run server, proxy and console until a signal stops them.

    `ready_fd` is the write end of a pipe. It gets all lines until the programs are ready, and then
    READY. Raises UserError if a program cannot be started, FakevllmError if a program does not stay
    up, and KeyboardInterrupt after SIGINT.
    """
    output = standard_output()
    lines = PrefixedLines(OWN_NAME, list(PROGRAMS), is_colored=is_colored(sys.stdout, os.environ))
    starters = [] if ready_fd is None else [LineWriter(ready_fd, closes_fd=True)]

    def write(name: str, line: str) -> None:
        text = lines.format(name, line)
        for writer in (output, *starters):
            writer.write(text)

    def announce(urls: Urls, processes: Sequence[SupervisedProcess]) -> None:
        given_up = {one.name for one in processes if one.is_given_up}
        has_console = "console" in urls and _title("console") not in given_up
        console = f"the console is {urls['console']}, " if has_console else ""
        server = f"the server is {urls['server']}"
        write(OWN_NAME, f"ready: apps use {urls['proxy']}/v1, {console}{server}")
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
                partial(wait_until_ready, settings, urls),
                partial(announce, urls, processes),
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
    """Create the processes without starting them, and return them with their addresses. `stack`
    closes the sockets on which they will listen."""
    programs = programs_of(settings)
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
            _title(name),
            one.module,
            one.arguments(urls),
            LineOutput(partial(write, name)),
            listeners[name],
            is_essential=one.is_essential,
        )
        for name, one in programs.items()
    ]
    return processes, urls


def _title(name: str) -> str:
    return f"the {name}"


async def _run(
    processes: Sequence[SupervisedProcess],
    wait_until_ready: Callable[[], Coroutine[None, None, None]],
    on_ready: Callable[[], None],
    on_note: Callable[[str], None],
) -> signal.Signals:
    """Run the processes until a signal arrives, and return the signal. A second signal kills the
    processes that have not ended yet."""

    def kill() -> None:
        on_note("killing what still runs")
        for process in processes:
            process.kill()

    with _signals(kill) as stop:
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
            names = ", then ".join(one.name for one in reversed(processes))
            on_note(f"stopping {names} (a second Ctrl-C kills them)")
    return number


@contextmanager
def _signals(on_second: Callable[[], None]) -> Generator[asyncio.Future[signal.Signals]]:
    """Yield a future that gets the first signal that asks this process to stop. Each further signal
    calls `on_second`. A signal that the process ignores, such as SIGHUP under nohup, stays
    ignored."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()

    def receive(number: signal.Signals) -> None:
        if stop.done():
            on_second()
        else:
            stop.set_result(number)

    numbers = [one for one in STOP_SIGNALS if signal.getsignal(one) is not signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, receive, number)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
