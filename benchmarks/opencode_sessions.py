"""The opencode example as its README runs it: agent-tiny trained through the real opencode, beside
a frozen control on the same sessions.

    python -m benchmarks.opencode_sessions --opencode COMMAND [--model FOLDER] [--seeds 2] [--write]

Without `--model` agent-tiny is made first. Exits with 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import connect
from statistics import fmean

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.results import ROOT, conditions, markdown_table, replace_section
from tests.e2e.processes import Process, Processes, wait_until

EXAMPLE = ROOT / "examples/opencode"
STEPS = 28
SESSIONS = 90
"""Of 2.6 requests each; 8 groups make a step."""
WINDOW = 4
"""Steps at either end over which the policy's mean is taken: 256 samples."""
LEAST_RISE = 0.15
"""Over its own start, and over the control's end."""
NUM_CALLS = 24
"""Answers to questions at either end."""
LAST_STEP_TIMEOUT_S = 60.0
TITLE = "opencode_sessions"


@dataclass(frozen=True, slots=True)
class Run:
    """One training run, or its frozen control."""

    seed: int
    control: str
    policy_mean: list[float]
    """By step: the mean reward of all siblings."""
    calls: list[float]
    """The same of each group that answers a question, in the order they came. The others are last
    words, which the model knows from the start."""
    said: str
    """What the users saw."""
    wall_s: float

    @property
    def start(self) -> float:
        return fmean(self.policy_mean[:WINDOW])

    @property
    def end(self) -> float:
        return fmean(self.policy_mean[-WINDOW:])


def make_model(folder: Path, opencode: str) -> Path:
    """By the README's command."""
    _user("examples.opencode.agent_tiny", "--out", str(folder), "--opencode", opencode)
    return folder


def run(
    folder: Path,
    model: Path,
    opencode: str,
    *,
    seed: int,
    control: str,
    sessions: int = SESSIONS,
    steps: int = STEPS,
) -> Run:
    """Server, proxy and users as the README starts them; all of it stopped in the end. The first
    `steps` steps count."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(folder / "fakevllm.toml", seed, control)
    with Processes(folder) as started:
        server = started.server("--backend", "embedded", "--model", str(model), "--seed", str(seed))
        proxy = started.proxy(server, "--config", str(config))
        users = ["--url", f"{proxy.url}/v1", "--opencode", opencode]
        users += ["--sessions", str(sessions), "--seed", str(seed)]
        said = _user("examples.opencode.mock_user_request", *users)
        wait_until(lambda: len(curve(proxy)) >= steps, LAST_STEP_TIMEOUT_S, "the last step")
        means = curve(proxy)[:steps]
        calls = call_means(proxy.folder / "ledger.sqlite")
    said = said.strip().splitlines()[-1]
    return Run(seed, control, means, calls, said, time.monotonic() - began)


def write_config(file: Path, seed: int, control: str) -> Path:
    """The example's own, which ends in its job."""
    text = (EXAMPLE / "fakevllm.toml").read_text()
    text = text.replace("examples/opencode/hooks", str(EXAMPLE / "hooks"))
    file.write_text(f'{text}seed = {seed}\ncontrol = "{control}"\n')
    return file


def curve(proxy: Process) -> list[float]:
    stats = httpx.get(f"{proxy.url}/fakevllm/stats").raise_for_status().json()
    return [step["policy_mean"] for step in stats["curve"]]


def call_means(ledger: Path) -> list[float]:
    with closing(connect(ledger)) as open_ledger:
        rows = open_ledger.execute(
            "select avg(reward) from groups join siblings using (group_id) "
            "where json_extract(request_json, '$.messages[#-1].role') = 'user' "
            "group by group_id having avg(reward) is not null order by min(received_at)"
        )
        return [mean for (mean,) in rows]


def _user(*command: str) -> str:
    """What it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--opencode", default="opencode", help="its command")
    parser.add_argument("--model", type=Path, help="agent-tiny, where it is made")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="Put the table into RESULTS.md.")
    args = parser.parse_args()
    told = conditions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = args.model or make_model(folder / "agent-tiny", args.opencode)
        runs = [
            run(folder / f"{control}-{seed}", model, args.opencode, seed=seed, control=control)
            for seed in range(args.seeds)
            for control in ("none", "frozen")
        ]
    header = ["seed", "updates", "policy mean at the start", "at the end", "change"]
    header += [f"first {NUM_CALLS} calls", f"last {NUM_CALLS}", "steps", "the users saw", "wall s"]
    rows = [_row(done) for done in runs]
    table = Table(*header, title=f"mean over the first and last {WINDOW} steps")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
    if args.write:
        legend = f"Start and end are means over {WINDOW} steps of 8 groups of 8. By step:\n\n"
        legend += "\n".join(f"- {_curve(done)}" for done in runs)
        replace_section(TITLE, f"{told}\n{markdown_table(header, rows)}\n{legend}")
    for learnt, frozen in zip(runs[::2], runs[1::2], strict=True):
        if learnt.end - max(learnt.start, frozen.end) < LEAST_RISE:
            sys.exit(f"seed {learnt.seed} rises by less than {LEAST_RISE}")


def _row(done: Run) -> list[str]:
    return [
        str(done.seed),
        "yes" if done.control == "none" else "no (frozen)",
        f"{done.start:.3f}",
        f"{done.end:.3f}",
        f"{done.end - done.start:+.3f}",
        f"{fmean(done.calls[:NUM_CALLS]):.3f}",
        f"{fmean(done.calls[-NUM_CALLS:]):.3f}",
        str(len(done.policy_mean)),
        done.said,
        f"{done.wall_s:.0f}",
    ]


def _curve(done: Run) -> str:
    return f"seed {done.seed}, {done.control}: " + " ".join(f"{m:.2f}" for m in done.policy_mean)


if __name__ == "__main__":
    main()
