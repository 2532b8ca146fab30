"""Let the release gate decide about good and bad updates of the fake engine, many times.

    python -m benchmarks.fake_gate_runs [--runs 200] [--parallel 2] [--seed 0] [--write]

Server, proxy and engine are the programs that users start, and an app asks questions. The fake
engine's only weight is in the run log, so the true mean reward of each version is known.

* Bad updates: ten steps train with the opposite rewards. The learning rate, and with it the fall of
  the mean reward, differs from run to run.
* Null updates: training changes no weights (`control = "frozen"`), so the candidate is equal to the
  released version.

The fake engine makes ten steps in about two seconds, so training could recover from bad steps
before their evaluation ends. The app therefore asks nothing while a step or an evaluation is due.

The exit code is 1 if a version that lost more than twice the margin stays, if more than 5 % of the
null updates are rejected, or if the training arm answered more than its share plus two points.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from benchmarks.arm_answers import count_answers
from benchmarks.results import conditions, markdown_table, print_table, replace_section
from benchmarks.run_log_reader import read_step_entries
from fakevllm.demo.gate_settings import PlantedSteps
from fakevllm.demo.release_watch import ReleaseWatch
from fakevllm_adapters.protocol.releases import Decision, ReleaseRecord, ReleasesReply
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Process, Processes

TITLE = "fake_gate_runs"
RUNS = 200
START_THETA = -1.0
"""The fake engine's weight before training."""
CANARY_SHARE = 0.2
EXCESS = 0.02
MARGIN = 0.1
EVALUATE_EVERY = 10
LEARNING_RATES = (0.2, 1.0)
"""Range from which the learning rate of a run with bad updates is drawn."""
FIRST_PLANTED = 12
"""Version from which the first planted step starts. The first evaluation is due at version 10.
While it is due, the app still causes one or two further versions. The next evaluation is due ten
versions later, just after the last planted step."""
NUM_USERS = 6
POLL_EVERY_S = 0.04
VERDICTS = (Decision.RELEASED, Decision.REJECTED, Decision.UNDECIDED)
RUN_TIMEOUT_S = 300.0
MAX_REJECTED = 0.05
SETTINGS = """
[job]
batch_size = 2
num_repeat = 4
{training}

[release]
mode = "gated"
eval_dataset = "{rows}"
canary_share = {canary}
evaluate_every = {every}
eval_samples = 4
margin = {margin}
max_samples = 2000
"""
PLANTED = PlantedSteps(FIRST_PLANTED + 1)
"""The steps that train with the opposite rewards. In null updates they have no effect."""
IsOver = Callable[[ReleasesReply], bool]
"""A function that returns whether a run is over."""


@dataclass(frozen=True, slots=True)
class GateRun:
    """The figures of one run of server, proxy and engine."""

    fall: float
    """True mean reward of the version that was released when the gate judged the worst candidate,
    minus the true mean reward of this candidate. It is 0 for a null update."""
    is_rejected: bool
    """Whether the gate rejected the worst candidate."""
    num_sessions: int
    """Number of sessions from the first planted step until training went back."""
    num_training: int
    """Number of these sessions that the training arm (the sessions with the newest version)
    answered."""

    @property
    def must_go_back(self) -> bool:
        return self.fall > 2 * MARGIN


def run_planted(folder: Path, seed: int) -> GateRun:
    """Train until the gate has judged the first candidate after the planted steps."""

    def is_over(releases: ReleasesReply) -> bool:
        return any(version > FIRST_PLANTED + 1 for version, _ in _verdicts(releases))

    lr = random.Random(seed).uniform(*LEARNING_RATES)
    ended = _run(folder, seed, f"lr = {lr}", is_over)
    back = _first_return(ended.releases)
    until = math.inf if back is None else back.time_s
    answers = count_answers(ended.ledger, ended.planted_at, until)
    return GateRun(*_worst_candidate(ended), *answers)


def run_null(folder: Path, seed: int) -> GateRun:
    """Evaluate one version that has the weights of the model itself."""

    def is_over(releases: ReleasesReply) -> bool:
        return bool(_verdicts(releases))

    ended = _run(folder, seed, 'control = "frozen"', is_over)
    return GateRun(*_worst_candidate(ended), 0, 0)


def _verdicts(releases: ReleasesReply) -> list[tuple[int, Decision]]:
    """Return the verdicts of the gate with their versions, oldest first."""
    return [
        (one.version, one.decision)
        for one in releases.records
        if one.version is not None and one.decision in VERDICTS
    ]


def _first_return(releases: ReleasesReply) -> ReleaseRecord | None:
    return next((one for one in releases.records if "restored" in one.evidence), None)


@dataclass(frozen=True, slots=True)
class EndedRun:
    """The data of a run of server and proxy after its end."""

    releases: ReleasesReply
    """The last reply of `GET /releases`."""
    steps: list[dict[str, Any]]
    """The steps of the run log."""
    planted_at: float
    """Unix time at which the first planted step began; infinite if no planted step has begun."""
    ledger: Path


def _worst_candidate(ended: EndedRun) -> tuple[float, bool]:
    """Return (fall, rejected) of the worst candidate. The fall is the true mean reward of the
    version that was released when the gate judged the candidate, minus that of the candidate. The
    second value is True if the gate rejected the candidate."""
    thetas = {0: START_THETA}
    thetas |= {one["version"]: one["metrics"]["theta"] for one in ended.steps}
    released, judged = 0, list[tuple[float, bool]]()
    for version, decision in _verdicts(ended.releases):
        fall = _mean(thetas[released]) - _mean(thetas[version])
        judged.append((fall, decision is Decision.REJECTED))
        if decision is Decision.RELEASED:
            released = version
    return max(judged)


def _mean(theta: float) -> float:
    """Return the true mean reward of the fake engine with the weight `theta`. The hook rewards
    "yes"."""
    return 1 / (1 + math.exp(-theta))


def _run(folder: Path, seed: int, training: str, is_over: IsOver) -> EndedRun:
    """Run the stack until the run is over. `training` is a setting of the section `[job]`."""
    folder.mkdir(parents=True)
    rows = folder / "held_out.jsonl"
    texts = [f"Is the held-out row number {number} answered with yes?" for number in range(50)]
    rows.write_text("".join(json.dumps({"question": text}) + "\n" for text in texts))
    config = folder / "fakevllm.toml"
    settings = {"training": training, "rows": rows, "canary": CANARY_SHARE, "margin": MARGIN}
    config.write_text(SETTINGS.format(every=EVALUATE_EVERY, **settings))
    hooks = write_hooks(folder / "hooks", PREFER_YES)
    with Processes(folder, shows_logs=False) as started:
        server = started.server("--backend", "fake", "--seed", str(seed))
        proxy = started.proxy(server, "--config", str(config), "--hooks", str(hooks))
        releases, planted_at = asyncio.run(_ask_until(server, proxy, is_over))
        steps = read_step_entries(server.folder)
    return EndedRun(releases, steps, planted_at, proxy.folder / "ledger.sqlite")


async def _ask_until(
    server: Process, proxy: Process, is_over: IsOver
) -> tuple[ReleasesReply, float]:
    """Let users ask questions until the run is over. Each question is a session of its own. Return
    the last reply with the releases, and the time at which the first planted step began."""
    may_ask, watch = asyncio.Event(), ReleaseWatch()

    async def user(number: int) -> None:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=60) as client:
            for turn in itertools.count():
                await may_ask.wait()
                question = f"User {number} asks question {turn}?"
                body = {"model": "fake", "messages": [{"role": "user", "content": question}]}
                (await client.post("/v1/chat/completions", json=body)).raise_for_status()

    async with (
        asyncio.timeout(RUN_TIMEOUT_S),
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
        asyncio.TaskGroup() as group,
    ):
        users = [group.create_task(user(number)) for number in range(NUM_USERS)]
        planted_at = math.inf
        while True:
            status = (await client.get("/get_engine_status")).json()
            releases = ReleasesReply.model_validate_json((await client.get("/releases")).content)
            watch.history_read(releases)
            version = status["weight_version"]
            if version >= FIRST_PLANTED:
                planted_at = min(planted_at, time.time())
            if is_over(releases):
                break
            if status["backlog"] >= 1 or watch.is_due(version, EVALUATE_EVERY):
                may_ask.clear()
            else:
                may_ask.set()
            await asyncio.sleep(POLL_EVERY_S)
        for task in users:
            task.cancel()
    return releases, planted_at


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=RUNS, help="number of runs of each kind")
    parser.add_argument("--parallel", type=int, default=1, help="number of runs at the same time")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    if not PLANTED.environment.items() <= os.environ.items():
        # Programs are forked from an interpreter with the environment that this process began with.
        os.environ.update(PLANTED.environment)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.fake_gate_runs", *sys.argv[1:]])
    run_conditions = conditions()
    seeds = range(args.seed, args.seed + args.runs)
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.parallel) as pool:
        start = partial(_start, Path(temporary))
        planted = list(pool.map(partial(start, run_planted, "planted"), seeds))
        null = list(pool.map(partial(start, run_null, "null"), seeds))
    rows = [[name, value] for name, value in _figures(planted, null).items()]
    header = ["what", "value"]
    print_table(header, rows, "")
    if args.write:
        replace_section(TITLE, f"{run_conditions}\n{markdown_table(header, rows)}")
    stayed = [one for one in planted if one.must_go_back and not one.is_rejected]
    if stayed or _share(planted) > CANARY_SHARE + EXCESS or _rejected(null) > MAX_REJECTED:
        sys.exit("Not all claims hold.")


def _start(folder: Path, run: Callable[[Path, int], GateRun], kind: str, seed: int) -> GateRun:
    one = run(folder / f"{kind}-{seed}", seed)
    print(kind, seed, one, flush=True)
    return one


def _share(planted: Sequence[GateRun]) -> float:
    """Return the share of the training arm in the sessions of all runs together."""
    total = sum(one.num_sessions for one in planted)
    return sum(one.num_training for one in planted) / max(total, 1)


def _rejected(runs: Sequence[GateRun]) -> float:
    return sum(one.is_rejected for one in runs) / max(len(runs), 1)


def _figures(planted: Sequence[GateRun], null: Sequence[GateRun]) -> dict[str, str]:
    falls = [one for one in planted if one.must_go_back]
    sessions = [one.num_sessions for one in planted if one.is_rejected]
    figures = {
        "runs with planted steps": str(len(planted)),
        f"of them with a candidate that is worse by more than {2 * MARGIN:g}": str(len(falls)),
        "of these, the candidate was rejected in": str(sum(one.is_rejected for one in falls)),
        "the worst candidate was rejected in all": str(sum(one.is_rejected for one in planted)),
        "median loss of the worst candidate": f"{median(one.fall for one in planted):.3f}",
        "share of the training arm until then": f"{_share(planted):.1%}",
        "null updates": str(len(null)),
        "of them rejected": str(sum(one.is_rejected for one in null)),
    }
    if sessions:
        figures["sessions until training went back, median"] = f"{median(sessions):.0f}"
        figures["at most"] = str(max(sessions))
    return figures


if __name__ == "__main__":
    main()
