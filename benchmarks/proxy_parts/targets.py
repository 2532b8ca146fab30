"""The processes under test: relays, and proxies with different numbers of siblings, each with its
own server."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from sqlite3 import connect

from benchmarks.proxy_parts import bare_relay, byte_clock, litellm_proxy
from benchmarks.proxy_parts.process_cpu import children_cpu_s, process_cpu_s
from tests.e2e.processes import Process, Processes, free_port, wait_until

RELAY = "bare relay"
MAX_MODEL_LEN = 1_300_000
"""Context of the fake engine, enough for a prompt of 1 MB and the answer."""
HOOK = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(index) for index in range(len(all_answers))]
"""
NUM_GROUPS_PER_STEP = 10_000
"""Number of groups of a training step. The number is so large that no step begins. A step would add
CPU time to the requests of only one round."""
REST_S = 0.1
REST_SHARE = 0.06
"""Maximum share of one CPU that a target uses at rest. The target's polling uses about half of this
share."""
REST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Cpu:
    """CPU seconds of the processes of one target."""

    relay: float = 0.0
    """CPU seconds of a bare relay, or of another proxy such as LiteLLM's."""
    proxy: float = 0.0
    hook: float = 0.0
    server: float = 0.0
    engine: float = 0.0

    def __sub__(self, other: Cpu) -> Cpu:
        return Cpu(*(getattr(self, name) - getattr(other, name) for name in self.__slots__))

    def __truediv__(self, number: float) -> Cpu:
        return Cpu(*(getattr(self, name) / number for name in self.__slots__))

    @property
    def ours(self) -> float:
        """CPU seconds of all processes except the engine and relays."""
        return self.proxy + self.hook + self.server

    @property
    def total(self) -> float:
        return self.relay + self.ours + self.engine


@dataclass(slots=True)
class Target:
    """A process that receives the load, and the server behind it."""

    name: str
    process: Process
    """Process to which the app's requests are sent."""
    server: Process
    num_siblings: int = 1
    has_hook: bool = False
    byte_clock: Process | None = None
    num_sent: int = field(default=0)
    """Number of requests sent so far."""

    @property
    def is_proxy(self) -> bool:
        return self.process.name == "proxy"

    def cpu(self) -> Cpu:
        """Return the CPU time of all processes so far."""
        first = process_cpu_s(self.process.pid)
        server = process_cpu_s(self.server.pid)
        engine = children_cpu_s(self.server.pid)
        if self.process is self.server:
            return Cpu(server=server, engine=engine)
        if not self.is_proxy:
            first += children_cpu_s(self.process.pid)
            return Cpu(relay=first, server=server, engine=engine)
        return Cpu(0.0, first, children_cpu_s(self.process.pid), server, engine)

    def wait_until_resting(self) -> Cpu:
        """Wait until the background work of the requests is done, and return the CPU time."""
        deadline = time.monotonic() + REST_TIMEOUT_S
        before = self.cpu()
        while time.monotonic() < deadline:
            time.sleep(REST_S)
            now = self.cpu()
            if (now - before).total < REST_SHARE * REST_S:
                return now
            before = now
        raise AssertionError(f"{self.name} still works {REST_TIMEOUT_S} s after the last request")

    def check_ledger(self) -> None:
        """Check that the ledger has a row for every request. A proxy that drops rows needs less
        CPU."""

        def is_complete() -> bool:
            with closing(connect(self.process.folder / "ledger.sqlite")) as ledger:
                (count,) = ledger.execute(
                    "select count(*) from groups where served_index is not null"
                ).fetchone()
            return count == self.num_sent

        wait_until(is_complete, 30, f"{self.num_sent} groups in the ledger of {self.name}")


def start_proxy(
    started: Processes,
    num_siblings: int,
    *,
    has_hook: bool,
    has_byte_clock: bool = False,
    groups_per_step: int = NUM_GROUPS_PER_STEP,
) -> Target:
    """Start a proxy with its own server. If two proxies shared a server, each proxy would also read
    the groups of the other proxy in the server's run log."""
    folder = _folder(num_siblings, has_hook)
    server = _start_server(started, f"server-{folder}")
    upstream: Process | str = server
    clock = None
    if has_byte_clock:
        clock = _start_relay(started, server, byte_clock.__file__)
        upstream = clock.url
    config = _write_config(
        started.folder / f"config-{folder}", num_siblings, has_hook, groups_per_step
    )
    proxy = started.proxy(upstream, "--config", str(config), folder=f"proxy-{folder}")
    name = target_name(num_siblings, has_hook=has_hook)
    return Target(name, proxy, server, num_siblings, has_hook, clock)


def ledger_file(started: Processes, num_siblings: int, *, has_hook: bool) -> Path:
    """Return the ledger of the proxy that `start_proxy` starts with these settings."""
    return started.folder / f"proxy-{_folder(num_siblings, has_hook)}" / "ledger.sqlite"


def _folder(num_siblings: int, has_hook: bool) -> str:
    return f"{num_siblings}{'-hook' if has_hook else ''}"


def target_name(num_siblings: int, *, has_hook: bool) -> str:
    """Return the name of a proxy with these settings."""
    return f"N={num_siblings}{', hook' if has_hook else ''}"


def start_relay(started: Processes, server: Process) -> Target:
    """Start a bare relay in front of a server whose engine runs."""
    return Target(RELAY, _start_relay(started, server, bare_relay.__file__), server)


def start_litellm(started: Processes, server: Process) -> Target:
    """Start LiteLLM's proxy in front of a server. Its environment is created if needed."""
    litellm_proxy.prepare_environment(litellm_proxy.ENVIRONMENT)
    process = _start_relay(started, server, litellm_proxy.__file__)
    return Target(f"LiteLLM {litellm_proxy.VERSION}", process, server)


def _start_server(started: Processes, folder: str) -> Process:
    length = f"--engine-arg=--max-model-len={MAX_MODEL_LEN}"
    return started.server("--backend", "fake", length, folder=folder)


def _start_relay(started: Processes, server: Process, program: str) -> Process:
    port = free_port()
    name = Path(program).stem
    command: Sequence[str] = [program, "--upstream", server.url, "--port", str(port)]
    process = Process(name, command, port, started.folder / f"{name}-{port}")
    return started.adopt(process).wait_until_healthy()


def _write_config(folder: Path, num_siblings: int, has_hook: bool, groups_per_step: int) -> Path:
    folder.mkdir(parents=True)
    lines = [f"[job]\nnum_repeat = {num_siblings}\nbatch_size = {groups_per_step}\n"]
    if has_hook:
        hooks = folder / "hooks"
        hooks.mkdir()
        (hooks / "on_compute_relative_reward.py").write_text(HOOK)
        lines.append(f"[hooks]\npath = {json.dumps(str(hooks))}\n")
    file = folder / "fakevllm.toml"
    file.write_text("\n".join(lines))
    return file
