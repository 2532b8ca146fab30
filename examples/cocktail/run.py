"""The three clients at once, each a process of its own, and the report:

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

from examples import ending
from examples.cocktail.report import realised
from examples.cocktail.tasks import MIXES, NUM_REPEAT, job
from examples.run_log import LOOK_EVERY_S, RunLog
from fakevllm import SwarmClient, SwarmError
from fakevllm_adapters.protocol.swarm import LogEntry

END_LIMIT_S = 10.0
"""For a client that gives up what it plays."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Three kinds of tasks train one model.")
    parser.add_argument("--server", default="http://127.0.0.1:10086")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--num-repeat", type=int, default=NUM_REPEAT)
    options = parser.parse_args()
    with SwarmClient(options.server) as client:  # one starts the engine, for three
        client.auto_sync_train_config_and_start_engine(job(options.num_repeat))
        if client.get_global_step() > options.steps:
            raise SwarmError(
                f"The server has trained {options.steps} steps before: begin anew with a new "
                "--run-dir of the server, or ask for more --steps."
            )
    place = ["--server", options.server, "--steps", str(options.steps)]
    command = [sys.executable, "-m", "examples.cocktail.client", *place]
    command += ["--num-repeat", str(options.num_repeat), "--mix"]
    log = RunLog(options.server)
    if num_before := len({step.step for step in log.new_steps()}):
        print(f"{num_before} of {options.steps} steps are trained; it goes on from there")
    clients = started([[*command, name] for name in MIXES])
    try:
        watch(clients, log, options.steps)
    finally:
        for one in clients:
            one.terminate()
        for one in clients:
            ended(one)
    subprocess.run([sys.executable, "-m", "examples.cocktail.report", *place], check=True)
    sys.exit(any(one.returncode for one in clients))


def ended(client: subprocess.Popen[bytes]) -> None:
    try:
        client.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        client.kill()
        client.wait()


def started(commands: Sequence[Sequence[str]]) -> list[subprocess.Popen[bytes]]:
    """Ctrl-C in the terminal is not for them: who has started them ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return [subprocess.Popen(command) for command in commands]
    finally:
        signal.signal(signal.SIGINT, before)


def watch(clients: Sequence[subprocess.Popen[bytes]], log: RunLog, num_steps: int) -> None:
    """Prints the steps until all clients are done."""
    is_over = False
    while not is_over:
        time.sleep(LOOK_EVERY_S)
        is_over = all(client.poll() is not None for client in clients)
        try:
            for step in log.new_steps():
                print(told(step, num_steps), flush=True)
        except httpx.HTTPError:
            pass  # the clients say that nobody answers


def told(step: LogEntry, num_steps: int) -> str:
    """
    >>> told(LogEntry(seq=1, kind="step", step=3, metrics={"reward_mean": 0.5}), 20)
    'step 3 of 20: mean reward 0.50, math 0%, words 0%, format 0%'
    """
    mix = ", ".join(f"{name} {share:.0%}" for name, share in realised([step]).items())
    return f"step {step.step} of {num_steps}: mean reward {step.metrics['reward_mean']:.2f}, {mix}"


if __name__ == "__main__":
    ending.run(main)
