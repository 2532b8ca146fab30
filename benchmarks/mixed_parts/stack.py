"""The processes under test: a server and a proxy that can be killed and restarted, and the web chat
in front of them. The module needs Linux, because memory is read from `/proc`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.mixed_parts.checks import MemoryReading, ProcessKill
from benchmarks.mixed_parts.clients import MODEL
from benchmarks.results import ROOT
from tests.e2e.processes import Process, Processes, free_port, wait_until

RESTART_TIMEOUT_S = 120.0
HOLD_S = RESTART_TIMEOUT_S
"""Seconds for which the proxy holds requests while the server is down. On a busy machine, the
restart of a killed server may take more than a minute."""
EXIT_TIMEOUT_S = 15.0
CONFIG = f"""
[hooks]
path = "hooks"
[models]
aliases = ["*"]
[upstream]
hold_s = {HOLD_S}
[job]
lr = 1e-6
num_repeat = 4
batch_size = 4
save_freq = 5
"""
HOOK = '''"""Reward short answers; give no two different answers the same reward."""


def on_compute_relative_reward(valid_results, all_answers):
    texts = [str(answer.get("content")) + str(answer.get("tool_calls")) for answer in all_answers]
    return [1.0 / (1 + len(text)) + sum(text.encode()) % 97 / 97 for text in texts]
'''


@dataclass(slots=True)
class Stack:
    """A running server and proxy, the kills, and the memory readings."""

    server: Process
    proxy: Process
    kills: list[ProcessKill] = field(default_factory=list[ProcessKill])
    memory: list[MemoryReading] = field(default_factory=list[MemoryReading])
    started_at: dict[str, float] = field(default_factory=dict[str, float])
    """Unix time of the last start, by process name."""

    async def kill(self, process: Process) -> None:
        """Kill the process with SIGKILL, restart it, and wait until proxy and engine are ready."""
        at, num_ready = time.time(), self.server.log.count("ready: ")
        await asyncio.to_thread(process.kill)
        process.start()
        self.started_at[process.name] = time.time()
        while process is self.server and self.server.log.count("ready: ") == num_ready:
            assert time.time() - at < RESTART_TIMEOUT_S, self.server.log
            await asyncio.sleep(0.1)
        await asyncio.to_thread(self.proxy.wait_until_healthy, RESTART_TIMEOUT_S)
        self.kills.append(ProcessKill(process.name, at, time.time() - at))
        print(f"Killed the {process.name}: ready after {time.time() - at:.1f} s", file=sys.stderr)

    def read_memory(self) -> None:
        """Append a reading of the server and one of the proxy."""
        for process in (self.server, self.proxy):
            now, name = time.time(), process.name
            num_restarts = sum(kill.name == name for kill in self.kills)
            age_s = now - self.started_at[name]
            mib = resident_mib(process.pid)
            self.memory.append(MemoryReading(name, now, num_restarts, age_s, mib))


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process and its descendants. Return 0 if the process has just
    ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return sum(map(int, own)) / 1024 + sum(resident_mib(int(child)) for child in children)


def find_remaining_processes(folder: Path) -> list[str]:
    """Return the command lines of processes that still use the run's folders.

    Wait up to EXIT_TIMEOUT_S for them to end: an engine needs a moment to notice that its server
    has ended.
    """
    folders = [str(folder / name) for name in ("server", "proxy")]
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while True:
        lines = [_command_line(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        remaining = [line for line in lines if any(name in line for name in folders)]
        if not remaining or time.monotonic() > deadline:
            return remaining
        time.sleep(0.2)


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:  # the process has just ended
        return ""


def start_stack(started: Processes, model: str) -> Stack:
    """Start server and proxy, and wait until the proxy is healthy."""
    folder = started.folder
    (folder / "hooks").mkdir()
    (folder / "hooks/on_compute_relative_reward.py").write_text(HOOK)
    config = folder / "fakevllm.toml"
    config.write_text(CONFIG.replace('"hooks"', f'"{folder / "hooks"}"'))
    server = started.server("--backend", "embedded", "--model", model)
    proxy = started.proxy(server, "--config", str(config), wait=False)
    now = time.time()
    stack = Stack(server, proxy, started_at={"server": now, "proxy": now})
    proxy.wait_until_healthy(RESTART_TIMEOUT_S)
    return stack


def start_web_chat(started: Processes, proxy: Process) -> Process:
    """Start the web chat. Like fakevllm's own processes, it ends when its standard input closes."""
    port, folder = free_port(), started.folder / "webchat"
    folder.mkdir()
    code = (
        "import os, sys, threading\n"
        "sys.argv.remove('--until-stdin-closes')\n"
        "wait = lambda: (sys.stdin.read(), os._exit(0))\n"
        "threading.Thread(target=wait, daemon=True).start()\n"
        "from examples.webchat.app import main\n"
        "main()\n"
    )
    os.environ |= {
        "OPENAI_BASE_URL": f"{proxy.url}/v1",
        "OPENAI_API_KEY": "sk-webchat",
        "OPENAI_MODEL": MODEL,
    }
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    app = started.adopt(Process("webchat", ["-c", code, "--port", str(port)], port, folder))
    wait_until(lambda: _is_up(app), RESTART_TIMEOUT_S, lambda: f"the web chat; its log:\n{app.log}")
    return app


def _is_up(app: Process) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{app.url}/api/chats").is_success
    return False
