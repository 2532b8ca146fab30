"""The opencode example as its README runs it: agent-tiny trained through the real opencode, beside
a frozen control on the same sessions.

    python -m benchmarks.opencode_sessions --opencode COMMAND [--model FOLDER] [--seeds 2] [--write]

Without `--model` agent-tiny is made first. Exits with 1 where a goal is missed.
"""

from __future__ import annotations

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

from benchmarks import learning_runs
from benchmarks.results import ROOT, conditions
from examples.opencode.recorded import found
from tests.e2e.processes import Process, Processes, wait_until

EXAMPLE = ROOT / "examples/opencode"
STEPS = 28
SESSIONS = 90
"""Of 2.6 requests each; 8 groups make a step."""
LEAST_RISE = 0.15
"""Over its own start, and over the control's end."""
NUM_CALLS = 24
"""Answers to questions at either end."""
LAST_STEP_TIMEOUT_S = 60.0
TITLE = "opencode_sessions"


@dataclass(frozen=True, slots=True)
class Run(learning_runs.Run):
    WINDOW = 4  # 256 samples

    calls: list[float]
    """The mean reward of each group that answers a question, in the order they came. The others
    are last words, which the model knows from the start."""
    said: str
    """What the users saw."""

    def own_cells(self) -> dict[str, str]:
        return {
            f"first {NUM_CALLS} calls": f"{fmean(self.calls[:NUM_CALLS]):.3f}",
            f"last {NUM_CALLS}": f"{fmean(self.calls[-NUM_CALLS:]):.3f}",
            "steps": str(len(self.policy_mean)),
            "the users saw": self.said,
        }


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
    return Run(seed, control, means, time.monotonic() - began, calls, said)


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
    parser = learning_runs.parser_of(__doc__)
    parser.add_argument("--opencode", default="opencode", type=found, help="its command")
    parser.add_argument("--model", type=Path, help="agent-tiny, where it is made")
    args = parser.parse_args()
    told = conditions()
    with tempfile.TemporaryDirectory() as name:
        model = args.model or make_model(Path(name) / "agent-tiny", args.opencode)

        def one(folder: Path, seed: int, control: str) -> Run:
            return run(folder, model, args.opencode, seed=seed, control=control)

        runs = learning_runs.with_controls(one, Path(name), args.seeds)
    learning_runs.show(runs)
    if args.write:
        legend = f"Start and end are means over {Run.WINDOW} steps of 8 groups of 8. By step:\n\n"
        legend += "\n".join(f"- {_curve(done)}" for done in runs)
        learning_runs.write(TITLE, told, runs, legend)
    for learnt, frozen in zip(runs[::2], runs[1::2], strict=True):
        if learnt.end - max(learnt.start, frozen.end) < LEAST_RISE:
            sys.exit(f"seed {learnt.seed} rises by less than {LEAST_RISE}")


def _curve(done: Run) -> str:
    return f"seed {done.seed}, {done.control}: " + " ".join(f"{m:.2f}" for m in done.policy_mean)


if __name__ == "__main__":
    main()
