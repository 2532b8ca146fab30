"""Run all three clients, each in a process of its own. Then print the report.

python -m examples.cocktail.run [--steps 20]
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import httpx

from examples import exit_codes
from examples.cocktail.report import trained_shares
from examples.cocktail.tasks import MIXES, NUM_REPEAT, create_job
from examples.run_log import POLL_INTERVAL_S, RunLog
from fakevllm import SwarmClient, SwarmError
from fakevllm_adapters.protocol.swarm import LogEntry

STOP_TIMEOUT_S = 10.0
"""Seconds that a client may take to abort its episodes before it is killed."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train one model on three kinds of tasks.")
    parser.add_argument("--server", default="http://127.0.0.1:10086")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--num-repeat", type=int, default=NUM_REPEAT)
    options = parser.parse_args()
    with SwarmClient(options.server) as client:  # starts the engine once for all clients
        client.auto_sync_train_config_and_start_engine(create_job(options.num_repeat))
        if client.get_global_step() > options.steps:
            raise SwarmError(
                f"The server has already trained {options.steps} steps: start it with a new "
                "--run-dir, or pass a larger --steps."
            )
    flags = ["--server", options.server, "--steps", str(options.steps)]
    command = [sys.executable, "-m", "examples.cocktail.client", *flags]
    command += ["--num-repeat", str(options.num_repeat), "--mix"]
    log = RunLog(options.server)
    if num_before := len({step.step for step in log.new_steps()}):
        print(f"{num_before} of {options.steps} steps are already trained; the run continues")
    clients = start([[*command, name] for name in MIXES])
    try:
        print_steps(clients, log, options.steps)
    finally:
        for process in clients:
            process.terminate()
        for process in clients:
            wait_or_kill(process)
    subprocess.run([sys.executable, "-m", "examples.cocktail.report", *flags], check=True)
    sys.exit(any(process.returncode for process in clients))


def start(commands: Sequence[Sequence[str]]) -> list[subprocess.Popen[bytes]]:
    """Start processes that ignore Ctrl-C in the terminal, because this script stops them."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return [subprocess.Popen(command) for command in commands]
    finally:
        signal.signal(signal.SIGINT, handler)


def wait_or_kill(process: subprocess.Popen[bytes]) -> None:
    """Wait until a terminated process has ended. Kill the process after the timeout."""
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def print_steps(clients: Sequence[subprocess.Popen[bytes]], log: RunLog, num_steps: int) -> None:
    """Print each new step until all clients have ended."""
    is_over = False
    while not is_over:
        time.sleep(POLL_INTERVAL_S)
        is_over = all(client.poll() is not None for client in clients)
        try:
            for step in log.new_steps():
                print(describe(step, num_steps), flush=True)
        except httpx.HTTPError:
            pass  # the clients report that no server answers


def describe(step: LogEntry, num_steps: int) -> str:
    """Describe a step in one line.

    >>> describe(LogEntry(seq=1, kind="step", step=3, metrics={"reward_mean": 0.5}), 20)
    'step 3 of 20: mean reward 0.50, math 0%, words 0%, format 0%'
    """
    mix = ", ".join(f"{name} {share:.0%}" for name, share in trained_shares([step]).items())
    return f"step {step.step} of {num_steps}: mean reward {step.metrics['reward_mean']:.2f}, {mix}"


if __name__ == "__main__":
    exit_codes.run(main)
