"""Compare `fakevllm retrain` with a live run that uses the new hook from its start.

    python -m benchmarks.retrain_gain [--seeds 3] [--first-seed 0] [--steps 30] [--write]

For each seed, the demo trains with its own hook, which wants the right sum. A new hook wants the
form "It is N." instead. `fakevllm retrain` trains the demo's model once on each group that the
logged run has trained, with the new hook. A group is a request with its sampled answers. Then the
demo trains the same model live with the new hook and another seed, on as many groups. The gain is
how much the share of answers of this form among the fixed questions rises.

The exit code is 1 if the gain of `retrain` is below 0.8 of the live gain with one of the seeds, if
less than 5 % of the logged answers have the form, or if `retrain` added a request to the ledger.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.learning_runs import create_parser
from benchmarks.results import conditions, markdown_table, print_table, replace_section
from fakevllm.demo.accuracy_probe import NUM_SAMPLES, Probe, probe
from fakevllm.demo.command import run_demo
from fakevllm.demo.run_state import DemoSettings
from fakevllm.demo.tasks import all_tasks
from fakevllm.sdk.client import SwarmClient
from fakevllm_adapters.job.model import TrainJob
from tests.e2e.processes import Processes

TITLE = "retrain_gain"
SEEDS = 3
STEPS = 30
SEED_OFFSET = 1000
"""Added to the seed of the live run, so that it does not repeat the logged run."""
LEAST_SHARE_OF_GAIN = 0.8
LEAST_LOGGED_SHARE = 0.05
COMMAND_TIMEOUT_S = 600.0
TRAINED = "state = 'trained'"
"""Condition on groups. The demo samples more groups than it trains."""
FORM = r"It is \d+\."
HOOK = f"""
import re


def on_compute_relative_reward(valid_results, all_answers):
    return [
        float(re.fullmatch(r"{FORM}", (answer["content"] or "").strip()) is not None)
        for answer in all_answers
    ]
"""


@dataclass(frozen=True, slots=True)
class SeedFigures:
    """The figures of one seed. All shares are shares of answers that have the form."""

    logged: float
    """Share among the logged answers that `retrain` trained."""
    start: float
    """Share of the model before training."""
    retrained: float
    live: float
    """Shares after `retrain` and after the live run."""
    groups: int
    """Groups that `retrain` trained."""
    live_groups: int
    ess: float
    """Effective sample size as a share of the tokens."""
    new_requests: int
    """Requests that `retrain` added to the ledger."""

    @property
    def share_of_gain(self) -> float:
        """The gain of `retrain`, as a share of the gain of the live run. NaN if the live run has no
        gain."""
        live_gain = self.live - self.start
        return (self.retrained - self.start) / live_gain if live_gain > 0 else math.nan

    @property
    def failures(self) -> list[str]:
        """The claims that do not hold."""
        shares = {
            "the share of the gain": (self.share_of_gain, LEAST_SHARE_OF_GAIN),
            "the share of logged answers with the form": (self.logged, LEAST_LOGGED_SHARE),
        }
        below = [
            f"{name} is {share:.2f}, below {least}"
            for name, (share, least) in shares.items()
            if share < least
        ]
        if math.isnan(self.share_of_gain):
            below.append("the live run has no gain")
        return [*below, *([f"{self.new_requests} new requests"] * bool(self.new_requests))]

    def cells(self, seed: int) -> list[str]:
        return [
            *(str(seed), f"{self.logged:.1%}", f"{self.ess:.0%}"),
            *(f"{self.start:.3f}", f"{self.retrained:.3f}", f"{self.live:.3f}"),
            *(f"{self.groups}, {self.live_groups}", f"{self.share_of_gain:.2f}"),
        ]


HEADER = [
    *("seed", "logged answers with the form", "effective sample size"),
    *("share before training", "after retrain", "after the live run"),
    *("groups of retrain, of the live run", "gain of retrain / live gain"),
]


def measure(folder: Path, seed: int, steps: int) -> SeedFigures:
    """Log one run, retrain its requests with the new hook, and train live with the new hook."""
    folder.mkdir(parents=True)
    hook = folder / "form.py"
    hook.write_text(HOOK)
    logged, retrained = folder / "logged", folder / "retrained"
    run_demo(DemoSettings(steps, seed, "none", logged, None))
    num_logged = num_groups(logged)
    json_file = folder / "retrained.json"
    run_command(
        *("fakevllm", "retrain", "--hooks", str(hook), "--run-dir", str(retrained)),
        *("--config", str(logged / "fakevllm.toml"), "--json", str(json_file)),
        *("--where", TRAINED),
    )
    numbers = json.loads(json_file.read_text())
    model = folder / "model"
    last_step = str(numbers["last_step"])
    run_command(
        *("fakevllm_server", "checkpoints", "export", last_step, str(model)),
        *("--run-dir", str(retrained)),
    )
    live = folder / "live"
    run_demo(DemoSettings(steps, seed + SEED_OFFSET, "none", live, None, hooks=hook))
    return SeedFigures(
        numbers["reward_mean"],
        share_of_form(read_probe(live / "probe_before.json")),
        share_of_form(probe_model(model, folder / "serving")),
        share_of_form(read_probe(live / "probe_after.json")),
        numbers["groups_in_steps"],
        num_groups(live, TRAINED),
        numbers["effective_sample_size"],
        num_groups(logged) - num_logged,
    )


def run_command(module: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", module, *arguments], check=True, timeout=COMMAND_TIMEOUT_S
    )


def num_groups(run_dir: Path, condition: str = "TRUE") -> int:
    """Return the number of groups in the ledger of a run that meet a condition."""
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as db:
        return db.execute(f"SELECT COUNT(*) FROM groups WHERE {condition}").fetchone()[0]


def read_probe(file: Path) -> Probe:
    """Return the answers to the fixed questions that a demo has stored."""
    return Probe(**json.loads(file.read_text()))


def probe_model(model: Path, folder: Path) -> Probe:
    """Serve a model folder, and return its answers to the fixed questions. Nothing is trained."""
    with Processes(folder, shows_logs=False) as started:
        server = started.server("--model", str(model))
        client = SwarmClient(server.url, verbose=False)
        client.auto_sync_train_config_and_start_engine(TrainJob(), timeout_s=COMMAND_TIMEOUT_S)
        name = str(client.get_engine_status()[1]["model"])
        return asyncio.run(probe(f"{server.url}/v1", name, all_tasks(), lambda: None))


def share_of_form(answers: Probe) -> float:
    """Return the share of answers that have the form.

    >>> share_of_form(Probe(1.0, [("What is 3 plus 4?", "It is 7.", True)]))
    1.0
    """
    texts = [text.strip() for _, text, _ in answers.samples]
    return sum(re.fullmatch(FORM, text) is not None for text in texts) / len(texts)


def main() -> None:
    parser = create_parser(__doc__, SEEDS)
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps of each run")
    args = parser.parse_args()
    run_conditions = conditions()
    rows: list[list[str]] = []
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            figures = measure(Path(temporary) / f"seed-{seed}", seed, args.steps)
            rows.append(figures.cells(seed))
            failures += [f"seed {seed}: {failure}" for failure in figures.failures]
    caption = (
        f"The logged run has {args.steps} steps with the demo's hook. `fakevllm retrain` trains "
        "each group of these steps once, from the untrained model, with a hook that wants the form "
        f'"It is N.". The live run has {args.steps} steps with this hook and another seed. Each '
        f"share is the share of {NUM_SAMPLES} answers to fixed questions that have the form."
    )
    print_table(HEADER, rows, caption)
    if args.write:
        replace_section(TITLE, f"{run_conditions}\n{markdown_table(HEADER, rows)}\n{caption}")
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
