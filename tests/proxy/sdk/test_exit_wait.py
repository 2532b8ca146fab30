"""The end of a script that has not shut down its executors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each test starts several processes

TIMEOUT_S = 30.0
SUBMISSIONS = {
    "PeriodicDrainThreadPoolExecutor": """
        executor = ajet.PeriodicDrainThreadPoolExecutor(workers=4, max_parallel=2)
        for number in range(4):
            executor.submit_with_periodic_drain(fn=episode, number=number)
        """,
    "BoundedThreadPoolExecutor": """
        executor = ajet.BoundedThreadPoolExecutor(max_workers=2)
        for number in range(4):
            executor.submit(episode, number)
        """,
    "TaskCountLimitedThreadPoolExecutor": """
        executor = ajet.TaskCountLimitedThreadPoolExecutor(max_parallel_groups=1, max_workers=2)
        executor.submit_group("task", episode, [{"number": number} for number in range(4)])
        """,
}


PREPARATION = """
    import asyncio, logging, sys, threading, time
    from fakevllm import ajet
    waits = threading.Event()
    class Handler(logging.Handler):
        def emit(self, record):
            if "the script waits for 4 submitted calls" in record.getMessage():
                sys.stdout.write("waits\\n")
                sys.stdout.flush()
                waits.set()
    logging.basicConfig(level="INFO", handlers=[Handler()])
    """


def script(body: str, name: str, end: str = "") -> list[str]:
    """Return the command of a script whose main thread submits four calls of `episode`, of which
    two run at once, and then runs the lines `end`. When the script begins to wait for its calls,
    it prints "waits" and sets the event `waits`."""
    parts = (
        textwrap.dedent(PREPARATION),
        textwrap.dedent(body),
        textwrap.dedent(SUBMISSIONS[name]),
        textwrap.dedent(end),
    )
    return [sys.executable, "-c", "".join(parts)]


FINISHING = """
    def episode(number):
        waits.wait()
        async def look_up():
            await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        asyncio.run(look_up())
        sys.stdout.write(f"{number}\\n")
    """
ENDLESS = """
    def episode(number):
        sys.stdout.write("begun\\n")
        sys.stdout.flush()
        time.sleep(1000)
    """


@pytest.mark.parametrize("name", SUBMISSIONS)
def test_the_end_of_a_script_waits_for_running_and_queued_calls(tmp_path: Path, name: str) -> None:
    done = subprocess.run(
        script(FINISHING, name), cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert sorted(done.stdout.split()) == ["0", "1", "2", "3", "waits"], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    "end",
    ["sys.stdout.write('waits\\n'); sys.stdout.flush(); time.sleep(1000)", ""],
    ids=["in its main thread", "while it waits for its calls"],
)
def test_ctrl_c_ends_a_script_at_once(tmp_path: Path, end: str) -> None:
    process = subprocess.Popen(
        script(ENDLESS, "PeriodicDrainThreadPoolExecutor", end),
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        lines = [process.stdout.readline().strip() for _ in range(3)]
        assert sorted(lines) == ["begun", "begun", "waits"]
        os.kill(process.pid, signal.SIGINT)
        process.wait(TIMEOUT_S)


def test_a_script_that_ends_with_an_error_does_not_wait(tmp_path: Path) -> None:
    done = subprocess.run(
        script(ENDLESS, "BoundedThreadPoolExecutor", "raise ValueError('mine')"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1 and done.stderr.endswith("ValueError: mine\n")


def test_a_forked_process_does_not_wait_for_the_calls_of_its_parent(tmp_path: Path) -> None:
    end = """
        import multiprocessing
        child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
        child.start()
        child.join()
        print("joined", flush=True)
        raise ValueError
        """
    done = subprocess.run(
        script(ENDLESS, "BoundedThreadPoolExecutor", end),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert "joined" in done.stdout.split()
