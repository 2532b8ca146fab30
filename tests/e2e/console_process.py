"""A console as a process, in front of a proxy of a test."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.processes import Process, Processes, free_port, wait_until


def start_console(processes: Processes, proxy: Process, *arguments: str) -> Process:
    return start_console_of_run(processes, proxy.folder, proxy.url, *arguments)


def start_console_of_run(
    processes: Processes, run_dir: Path, proxy_url: str, *arguments: str
) -> Process:
    """Start a console for a run whose proxy may have ended."""
    port = free_port()
    command = ["-m", "fakevllm", "console", "--run-dir", str(run_dir), "--url", proxy_url]
    command += ["--port", str(port), *arguments]
    console = Process("console", command, port, processes.folder / f"console-{port}")
    return processes.adopt(console).wait_until_healthy()


def login_url(console: Process) -> str:
    """Return the link that the console has printed last."""

    def links() -> list[str]:
        return re.findall(r"console: open (\S+)", console.log)

    wait_until(lambda: bool(links()), 10.0, "the link for the login")
    return links()[-1]
