"""A console as a process, in front of a proxy of a test."""

from __future__ import annotations

import re

from tests.e2e.processes import Process, Processes, free_port, wait_until


def start_console(processes: Processes, proxy: Process, *arguments: str) -> Process:
    port = free_port()
    command = ["-m", "fakevllm", "console", "--run-dir", str(proxy.folder), "--url", proxy.url]
    command += ["--port", str(port), *arguments]
    console = Process("console", command, port, processes.folder / f"console-{port}")
    return processes.adopt(console).wait_until_healthy()


def login_url(console: Process) -> str:
    """Return the link that the console has printed last."""

    def links() -> list[str]:
        return re.findall(r"console: open (\S+)", console.log)

    wait_until(lambda: bool(links()), 10.0, "the link for the login")
    return links()[-1]
