"""Train agent-tiny through opencode, as the example's README does, and run a frozen control.

    python -m benchmarks.opencode_sessions --opencode COMMAND [--model FOLDER] [--seeds 2] [--write]

Both runs use the same sessions. With `--gated`, the run with the release gate is measured instead
of the control. Without `--model` agent-tiny is created first. The exit code is 1 if the reward does
not rise enough.
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
from examples.opencode.opencode_command import locate_command
from fakevllm_adapters.protocol.releases import Decision, ReleasesReply
from tests.e2e.processes import Process, Processes, wait_until

EXAMPLE = ROOT / "examples/opencode"
STEPS = 28
SESSIONS = 90
"""Number of sessions. A session has 2.6 requests on average; a step takes 8 groups."""
GATED_SESSIONS = 180
"""Number of sessions with the release gate. With the gate, less than half of the requests are
trained: only requests of the training arm that do not quote a held-out row."""
GATED_STEPS = 20
MIN_RISE = 0.15
"""Required rise of the policy mean (mean reward of all siblings). At the end of the training run,
the policy mean must exceed its value at the start of this run, and its value at the end of the
control run, by this number."""
NUM_CALLS = 24
"""Number of calls at the start of a run, and at its end, over which mean rewards are computed."""
LAST_STEP_TIMEOUT_S = 60.0
TITLE = "opencode_sessions"


@dataclass(frozen=True, slots=True)
class OpencodeRun(learning_runs.LearningRun):
    """One training run through opencode, or its frozen control."""

    WINDOW = 4  # 256 samples

    calls: list[float]
    """Mean reward of each group that answers a question of the user, oldest first. The other groups
    are closing messages after a tool call, which the model writes correctly from the start."""
    users_summary: str
    """Last line that the mock users printed: turns, passed tests, failed sessions."""
    releases: str = "-"
    """Decisions of the release gate, in order; "-" without the gate. With the gate, one of five
    questions is held out and not trained."""

    def own_cells(self) -> dict[str, str]:
        return {
            f"first {NUM_CALLS} calls": f"{fmean(self.calls[:NUM_CALLS]):.3f}",
            f"last {NUM_CALLS}": f"{fmean(self.calls[-NUM_CALLS:]):.3f}",
            "steps": str(len(self.policy_mean)),
            "the users saw": self.users_summary,
            "releases": self.releases,
        }


def make_model(folder: Path, opencode: str) -> Path:
    """Create agent-tiny with the README's command, and return its folder."""
    _run_module("examples.opencode.agent_tiny", "--out", str(folder), "--opencode", opencode)
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
    held_out: Path | None = None,
) -> OpencodeRun:
    """Start server, proxy and mock users as the README does, and stop all of them at the end.

    Only the first `steps` steps count. With the file `held_out`, the release gate decides which
    version answers.
    """
    started_s = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    config = write_config(folder / "fakevllm.toml", seed, control, held_out)
    with Processes(folder) as started:
        server = started.server("--backend", "embedded", "--model", str(model), "--seed", str(seed))
        proxy = started.proxy(server, "--config", str(config))
        users = ["--url", f"{proxy.url}/v1", "--opencode", opencode]
        users += ["--sessions", str(sessions), "--seed", str(seed)]
        output = _run_module("examples.opencode.mock_user_request", *users)
        wait_until(lambda: len(policy_means(proxy)) >= steps, LAST_STEP_TIMEOUT_S, "the last step")
        means = policy_means(proxy)[:steps]
        calls = call_means(proxy.folder / "ledger.sqlite")
        releases = decisions(server) if held_out is not None else "-"
    users_summary = output.strip().splitlines()[-1]
    wall_s = time.monotonic() - started_s
    return OpencodeRun(seed, control, means, wall_s, calls, users_summary, releases)


def run_gated_pair(folder: Path, model: Path, opencode: str, seed: int) -> list[OpencodeRun]:
    """Run the same sessions without and with the release gate, and return both runs."""
    held_out = folder / "held_out.jsonl"
    _run_module("examples.opencode.held_out", "--out", str(held_out), "--opencode", opencode)

    def run_one(name: str, gate: Path | None) -> OpencodeRun:
        return run(
            folder / f"{name}-{seed}",
            model,
            opencode,
            seed=seed,
            control="none",
            sessions=GATED_SESSIONS,
            steps=GATED_STEPS,
            held_out=gate,
        )

    return [run_one("ungated", None), run_one("gated", held_out)]


def decisions(server: Process) -> str:
    """Return the decisions about versions, and the version that answers at the end."""
    history = ReleasesReply.model_validate(
        httpx.get(f"{server.url}/releases").raise_for_status().json()
    )
    verdicts = [
        f"{record.version} {record.decision}"
        for record in history.records
        if record.decision is not Decision.CANDIDATE
    ]
    return f"{', '.join(verdicts) or 'none'}; {history.released} answers at the end"


def write_config(file: Path, seed: int, control: str, held_out: Path | None = None) -> Path:
    """Write the example's configuration with seed and control added to its last section, `[job]`.
    If the file `held_out` is given, the configuration has the release gate."""
    name = "fakevllm.toml" if held_out is None else "gated.toml"
    text = (EXAMPLE / name).read_text()
    text = text.replace("examples/opencode/hooks", str(EXAMPLE / "hooks"))
    text = text.replace("runs/opencode-held-out.jsonl", str(held_out))
    file.write_text(f'{text}seed = {seed}\ncontrol = "{control}"\n')
    return file


def policy_means(proxy: Process) -> list[float]:
    """Return the mean reward of each training step."""
    stats = httpx.get(f"{proxy.url}/fakevllm/stats").raise_for_status().json()
    return [step["policy_mean"] for step in stats["curve"]]


def call_means(ledger: Path) -> list[float]:
    """Return the mean reward of each group whose last message is the user's, oldest first. Rows of
    evaluations are left out."""
    with closing(connect(ledger)) as open_ledger:
        rows = open_ledger.execute(
            "select avg(reward) from groups join siblings using (group_id) "
            "where json_extract(request_json, '$.messages[#-1].role') = 'user' "
            "and kind is not 'eval' and (arm is null or arm = 'training') "
            "group by group_id having avg(reward) is not null order by min(received_at)"
        )
        return [mean for (mean,) in rows]


def _run_module(*command: str) -> str:
    """Run `python -m` with a module and its arguments, and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def main() -> None:
    parser = learning_runs.create_parser(__doc__)
    parser.add_argument(
        "--opencode", default="opencode", type=locate_command, help="command of opencode"
    )
    parser.add_argument("--model", type=Path, help="folder of agent-tiny, if it exists")
    parser.add_argument("--gated", action="store_true", help="compare with the release gate")
    args = parser.parse_args()
    run_conditions = conditions()
    with tempfile.TemporaryDirectory() as name:
        model = args.model or make_model(Path(name) / "agent-tiny", args.opencode)

        def run_seed(folder: Path, seed: int, control: str) -> OpencodeRun:
            return run(folder, model, args.opencode, seed=seed, control=control)

        if args.gated:
            runs = [
                one
                for seed in range(args.seeds)
                for one in run_gated_pair(Path(name), model, args.opencode, seed)
            ]
        else:
            runs = learning_runs.run_with_controls(run_seed, Path(name), args.seeds)
    learning_runs.print_runs(runs)
    if args.write:
        legend = (
            f"Start and end are means over {OpencodeRun.WINDOW} steps of 8 groups of 8 siblings. "
        )
        legend += "Policy mean of each step:\n\n"
        legend += "\n".join(f"- {_curve(one)}" for one in runs)
        title = f"{TITLE} with the release gate" if args.gated else TITLE
        learning_runs.write_section(title, run_conditions, runs, legend)
    if args.gated:
        return
    for trained, frozen in zip(runs[::2], runs[1::2], strict=True):
        if trained.end - max(trained.start, frozen.end) < MIN_RISE:
            sys.exit(f"seed {trained.seed}: the policy mean rose by less than {MIN_RISE}")


def _curve(run: OpencodeRun) -> str:
    label = "trained" if run.control == "none" else run.control
    label += "" if run.releases == "-" else " with the gate"
    return f"seed {run.seed}, {label}: " + " ".join(f"{mean:.2f}" for mean in run.policy_mean)


if __name__ == "__main__":
    main()
