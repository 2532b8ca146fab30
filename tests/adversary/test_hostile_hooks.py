"""Hooks that do the worst that a user's code does by mistake.

Each case is the body of a hook. The call of the hostile hook must end in time, with a reason that
names the fault. The next call must succeed, if necessary in a new hook process. What an app gets
meanwhile is tested in tests/e2e/test_trouble.py.
"""

from __future__ import annotations

import asyncio
import textwrap
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from fakevllm.hooks.hook_runner import ANSWER_GRACE_S, HookWorker
from fakevllm.hooks.results import RewardOutcome
from tests.e2e.processes import wait_until
from tests.proxy.hooks.hook_calls import reward, until_exists
from tests.proxy.hooks.test_sandbox import is_running

TIMEOUT_S = 2.0
LIMIT_S = 2 * (TIMEOUT_S + ANSWER_GRACE_S) + 10.0
"""Seconds in which every call must end. A call may be sent to an old and to a new process."""
FINE = "fine"
"""Question of a call whose hook returns rewards."""

FAULTS: dict[str, tuple[str, str]] = {
    # errors
    "raises an error that is no Exception": (
        "raise OddBase('x')",
        "hook_raised: hook.OddBase: x",
    ),
    "raises KeyboardInterrupt": ("raise KeyboardInterrupt", "hook_raised: KeyboardInterrupt"),
    "raises GeneratorExit": ("raise GeneratorExit", "hook_raised: GeneratorExit"),
    "raises CancelledError": ("raise asyncio.CancelledError", "hook_raised: "),
    "raises an error with a message of 10 MB": ("raise ValueError('x' * 10**7)", "hook_raised: "),
    "raises an error whose message is no UTF-8": (
        "raise ValueError('\\ud800')",
        "hook_raised: ValueError: ",
    ),
    "raises an error that cannot be printed": (
        "raise Unprintable",
        "hook_raised: hook.Unprintable: ",
    ),
    "recurses without end": (
        "def f(): f()\nf()",
        "hook_raised: RecursionError",
    ),
    "raises after it has closed its output": (
        "sys.stdout = None; sys.stderr.close(); raise ValueError('x')",
        "hook_raised: ValueError: x",
    ),
    "raises after it has closed the descriptors of its output": (
        "os.close(1); os.close(2); raise ValueError('x')",
        "hook_raised: ValueError: x",
    ),
    # results
    "returns a generator": ("return (1.0 for _ in a)", "hook_type: got generator"),
    "returns a class": ("return list", "hook_type: got type"),
    "returns a list that lies about its length": (
        "class Odd(list):\n    def __len__(self): return 2\nreturn Odd([1.0])",
        "hook_length",
    ),
    "returns a list that cannot be read": (
        "class Odd(list):\n    def __iter__(self): raise SystemExit\nreturn Odd([1.0, 2.0])",
        "hook_raised: SystemExit",
    ),
    "returns numbers that are NaN when they are read": (
        "class Odd:\n    def __float__(self): return float('nan')\nreturn [Odd(), Odd()]",
        "hook_nan",
    ),
    "returns an endless list": (
        "class Odd(list):\n"
        "    def __iter__(self):\n        while True: yield 1.0\n"
        "return Odd([1.0, 2.0])",
        "hook_length: got 3, want 2",
    ),
    # annotations
    "puts the answers into themselves": ("a[0]['all'] = a; raise ValueError", "hook_raised"),
    "annotates with a value that cannot be compared": (
        "class Odd:\n    def __eq__(self, other): raise SystemExit\n"
        "a[0]['content'] = Odd(); raise ValueError('x')",
        "hook_raised: ValueError: x",
    ),
    "annotates with keys that are no UTF-8": (
        "a[0]['\\ud800'] = 1; raise ValueError",
        "hook_raised",
    ),
    "replaces the answers by something else": ("a[:] = [5]; raise ValueError", "hook_raised"),
}
"""Maps the body of each hook that fails inside its process to the beginning of the expected
reason."""

PROCESS_FAULTS: dict[str, tuple[str, str]] = {
    # the end of the process
    "aborts its process": ("os.abort()", "hook_crashed: the hook ended its process by SIGABRT"),
    "kills its process": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        "hook_crashed: the hook ended its process by SIGKILL",
    ),
    "reads memory that is not there": (
        "faulthandler.disable(); ctypes.string_at(0)",
        "hook_crashed: the hook ended its process by SIGSEGV",
    ),
    "stops its process": (
        "os.kill(os.getpid(), signal.SIGSTOP); time.sleep(600)",
        "hook_timeout",
    ),
    # time
    "computes without end": ("while True: pass", "hook_timeout"),
    "returns numbers that never become a number": (
        "class Odd:\n    def __float__(self):\n        while True: pass\nreturn [Odd(), 1.0]",
        "hook_timeout",
    ),
    "sleeps": ("time.sleep(600)", "hook_timeout"),
    # descriptors and the connection to the proxy
    "closes all descriptors": ("os.closerange(3, 4096); time.sleep(600)", "hook_"),
    # The hook's time limit, or that of a process without a connection, whichever ends first
    "closes the connection to the proxy": ("os.close(connection())", "hook_"),
    "writes text to the connection": (
        "os.write(connection(), b'hello, proxy'); time.sleep(600)",
        "hook_crashed: the hook process sent something that is no reply",
    ),
    "announces a reply of four gigabytes": (
        "os.write(connection(), b'\\xff\\xff\\xff\\xff'); time.sleep(600)",
        "hook_crashed: the hook process sent something that is no reply",
    ),
    "sends a reply that is no object": (
        "os.write(connection(), b'\\0\\0\\0\\2[]'); time.sleep(600)",
        "hook_crashed: the hook process sent something that is no reply",
    ),
    # children
    "forks, and both processes return": ("os.fork(); return [1.0]", "hook_length"),
    "forks a child that keeps the connection, and ends": (
        "os.fork() or time.sleep(600)\nos._exit(3)",
        "hook_",
    ),
    "leaves a child in a session of its own": (
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(15)\nos._exit(3)",
        "hook_",
    ),
    # the interpreter
    "breaks the library that writes replies": ("import orjson; orjson.dumps = None", "hook_"),
}
"""Maps the body of each hook whose process must end to the beginning of the expected reason."""

HARMLESS: dict[str, str] = {
    "prints 5 MB": "print('x' * 5_000_000)",
    "closes its output": "sys.stdout = None",
    "changes the directory and the environment": "os.chdir('/'); os.environ.clear()",
    "ignores signals": "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})",
    "changes its arguments": "a[0].clear(); a.clear(); v.clear()",
    "forgets all modules": "sys.modules.clear()",
    "starts threads that never end": "threading.Thread(target=time.sleep, args=(600,)).start()",
}
"""Hooks that return rewards."""

HELPERS = """
import asyncio, ctypes, faulthandler, gc, os, signal, sys, threading, time

class OddBase(BaseException): pass

class Unprintable(Exception):
    def __str__(self): raise SystemExit

def connection():
    return next(one._sock for one in gc.get_objects() if type(one).__name__ == "_Child").fileno()
"""
"""The beginning of the hook file. `connection` returns the descriptor of the connection to the
proxy."""


def hook_file(kind: str) -> str:
    """Return a hook file whose hook does what the question names.

    `kind` is "def" or "async def".
    """
    parts = [HELPERS, f"{kind} on_compute_relative_reward(v, a, q):\n    num = len(a)"]
    bodies = {name: body for name, (body, _) in (FAULTS | PROCESS_FAULTS).items()} | HARMLESS
    for name, body in bodies.items():
        parts.append(f"    if q == {name!r}:\n" + textwrap.indent(body, " " * 8))
    return "\n".join([*parts, "    return [1.0] * num", ""])


class Attacked:
    """A worker with the hooks of this file."""

    def __init__(self, loop: asyncio.Runner, folder: Path, kind: str) -> None:
        (folder / "hook.py").write_text(hook_file(kind))
        self._loop = loop
        self.worker = HookWorker(folder, TIMEOUT_S)
        loop.run(self.worker.start())

    def call(self, question: str) -> RewardOutcome:
        """Call the hook with two answers. Raises TimeoutError after LIMIT_S."""

        async def limited() -> RewardOutcome:
            async with asyncio.timeout(LIMIT_S):
                return await reward(self.worker, "a", "b", question=question)

        return self._loop.run(limited())

    def close(self) -> None:
        self._loop.run(self.worker.close())


@pytest.fixture(scope="module", params=["def", "async def"])
def attacked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Attacked]:
    with asyncio.Runner() as loop:
        attacked = Attacked(loop, tmp_path_factory.mktemp("hooks"), request.param)
        yield attacked
        attacked.close()


def check_fault(attacked: Attacked, name: str, reason: str) -> None:
    outcome = attacked.call(name)
    assert outcome.rewards is None
    assert outcome.reason is not None and outcome.reason.startswith(reason), outcome.reason
    assert len(outcome.reason) < 1000 and outcome.reason.isprintable()
    assert attacked.call(FINE).rewards == [1.0, 1.0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_hook_that_fails_has_a_reason_and_the_next_call_succeeds(
    attacked: Attacked, name: str
) -> None:
    check_fault(attacked, name, FAULTS[name][1])


@pytest.mark.slow
@pytest.mark.parametrize("attacked", ["def"], indirect=True)
@pytest.mark.parametrize("name", PROCESS_FAULTS)
def test_a_hook_that_ruins_its_process_fails_in_time_and_the_next_call_succeeds(
    attacked: Attacked, name: str
) -> None:
    check_fault(attacked, name, PROCESS_FAULTS[name][1])


@pytest.mark.parametrize("name", HARMLESS)
def test_a_hook_that_only_spoils_its_own_process_keeps_its_rewards(
    attacked: Attacked, name: str
) -> None:
    assert attacked.call(name).rewards == [1.0, 1.0]
    assert attacked.call(FINE).rewards == [1.0, 1.0]


LEAVES_MUCH_RUNNING = """
import atexit, os, signal, threading, time
from pathlib import Path

atexit.register(time.sleep, 600)
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGTERM, signal.SIGINT}})
for _ in range(20):
    threading.Thread(target=time.sleep, args=(600,)).start()
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    with open({file!r}, "a") as out:
        out.write(f"{{pid}}\\n")

def on_compute_relative_reward(v, a, q):
    Path({begun!r}).touch()
    time.sleep(600)
"""


def test_a_worker_closes_in_time_with_all_that_its_hooks_have_left_running(tmp_path: Path) -> None:
    file, begun = tmp_path / "pids", tmp_path / "begun"
    text = LEAVES_MUCH_RUNNING.format(file=str(file), begun=str(begun))
    (tmp_path / "hook.py").write_text(text)

    async def start_call_and_close() -> tuple[RewardOutcome, float]:
        worker = HookWorker(tmp_path, 60.0)
        await worker.start()
        call = asyncio.create_task(reward(worker, "a"))
        await until_exists(begun)
        start = time.monotonic()
        await worker.close()
        return await call, time.monotonic() - start

    outcome, close_s = asyncio.run(start_call_and_close())
    assert outcome.reason == "hook_closed: the proxy is stopping"
    assert close_s < LIMIT_S
    pids = [int(line) for line in file.read_text().splitlines()]
    assert len(pids) == 20
    wait_until(lambda: not any(map(is_running, pids)), 10, "the end of the forked processes")
