"""What the mixed traffic runs on: a server and a proxy that are killed and come back, and the web
chat before them. Linux, for what they weigh."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.mixed_checks import Kill, Weight
from benchmarks.mixed_clients import MODEL
from benchmarks.results import ROOT
from tests.e2e.processes import Process, Processes, free_port, wait_until

BACK_TIMEOUT_S = 120.0
HOLD_S = BACK_TIMEOUT_S
"""As long as a killed server may take: over a minute on a machine that has much else to do."""
LEAVE_TIMEOUT_S = 15.0
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
HOOK = '''"""Short answers are good; no two different ones are equally so."""


def on_compute_relative_reward(valid_results, all_answers):
    texts = [str(answer.get("content")) + str(answer.get("tool_calls")) for answer in all_answers]
    return [1.0 / (1 + len(text)) + sum(text.encode()) % 97 / 97 for text in texts]
'''


@dataclass(slots=True)
class Stack:
    server: Process
    proxy: Process
    kills: list[Kill] = field(default_factory=list[Kill])
    weights: list[Weight] = field(default_factory=list[Weight])
    started: dict[str, float] = field(default_factory=dict[str, float])

    async def kill(self, process: Process) -> None:
        """At once, and up again; the engine is awaited too."""
        at, num_ready = time.time(), self.server.log.count("ready: ")
        await asyncio.to_thread(process.kill)
        process.start()
        self.started[process.name] = time.time()
        while process is self.server and self.server.log.count("ready: ") == num_ready:
            assert time.time() - at < BACK_TIMEOUT_S, self.server.log
            await asyncio.sleep(0.1)
        await asyncio.to_thread(self.proxy.wait_until_healthy, BACK_TIMEOUT_S)
        self.kills.append(Kill(process.name, at, time.time() - at))
        print(f"killed the {process.name}: up after {time.time() - at:.1f} s", file=sys.stderr)

    def weigh(self) -> None:
        for process in (self.server, self.proxy):
            now, name = time.time(), process.name
            life = sum(kill.name == name for kill in self.kills)
            age_s = now - self.started[name]
            mib = resident_mib(process.pid)
            self.weights.append(Weight(name, now, life, age_s, mib))


def resident_mib(pid: int) -> float:
    """With all children; 0 for a process that has just gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = [line.split()[1] for line in status.splitlines() if line.startswith("VmRSS")]
    return sum(map(int, own)) / 1024 + sum(resident_mib(int(child)) for child in children)


def left_behind(folder: Path) -> list[str]:
    """Command lines that name the run's own folders, of processes that do not leave: an engine
    takes a moment to see that its server has gone."""
    own = [str(folder / name) for name in ("server", "proxy")]
    deadline = time.monotonic() + LEAVE_TIMEOUT_S
    while True:
        lines = [_command_line(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        left = [line for line in lines if any(name in line for name in own)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _command_line(process: Path) -> str:
    try:
        return (process / "cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:  # it has just gone
        return ""


def start(started: Processes, model: str) -> Stack:
    folder = started.folder
    (folder / "hooks").mkdir()
    (folder / "hooks/on_compute_relative_reward.py").write_text(HOOK)
    config = folder / "fakevllm.toml"
    config.write_text(CONFIG.replace('"hooks"', f'"{folder / "hooks"}"'))
    server = started.server("--backend", "embedded", "--model", model)
    proxy = started.proxy(server, "--config", str(config), wait=False)
    now = time.time()
    stack = Stack(server, proxy, started={"server": now, "proxy": now})
    proxy.wait_until_healthy(BACK_TIMEOUT_S)
    return stack


def start_web_chat(started: Processes, proxy: Process) -> Process:
    """It ends with its standard input as our own processes do."""
    port, folder = free_port(), started.folder / "webchat"
    folder.mkdir()
    code = (
        "import os, sys, threading\n"
        "sys.argv.remove('--until-stdin-closes')\n"
        "ended = lambda: (sys.stdin.read(), os._exit(0))\n"
        "threading.Thread(target=ended, daemon=True).start()\n"
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
    wait_until(lambda: _is_up(app), BACK_TIMEOUT_S, lambda: f"the web chat: {app.log}")
    return app


def _is_up(app: Process) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{app.url}/api/chats").is_success
    return False
