"""Run `fakevllm train`: load the YAML file, train, and print a summary of the rewards."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from rich.console import Console

from fakevllm.runtime.local_engines import EngineChoice
from fakevllm.train.config import Settings, load
from fakevllm.train.rollout_loop import Outcome
from fakevllm.train.training_inputs import load_inputs
from fakevllm.train.training_run import train

NUM_SUMMARY_STEPS = 5
"""The summary averages the mean rewards of this many steps at the start of a run, and of this many
steps at the end. The mean reward of a single step is noisy."""


def run_train(conf: Path) -> Outcome:
    """Train with the settings in the YAML file `conf`, and print a summary. Return the mean rewards
    of the training steps and of the evaluations.

    Mistakes in the file, the workflow or the dataset raise UserError before any process is started.
    """
    console = Console()
    settings = load(conf)
    for warning in settings.warnings:
        console.print(f"the job's {warning}", style="yellow", highlight=False, markup=False)
    if settings.server.url is None:  # checked first, because loading a dataset may take long
        EngineChoice.resolve(settings.server.backend).check_installed()
    inputs = load_inputs(settings)
    try:
        outcome = train(settings, inputs, console)
    except KeyboardInterrupt:
        console.print(
            f"Stopped. To continue: fakevllm train --conf {conf}", highlight=False, markup=False
        )
        raise
    for line in summarize(outcome, settings, inputs.num_steps, len(inputs.eval_tasks)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return outcome


def summarize(
    outcome: Outcome, settings: Settings, num_steps: int, num_eval_tasks: int
) -> list[str]:
    """Return the lines that summarize a run whose last step is trained."""
    lines: list[str] = []
    rewards = outcome.rewards
    if not rewards:
        lines.append(f"All {num_steps} steps were trained by earlier runs.")
    else:
        first, last = fmean(rewards[:NUM_SUMMARY_STEPS]), fmean(rewards[-NUM_SUMMARY_STEPS:])
        earlier = (
            f" (of {num_steps}; earlier runs trained the rest)" if outcome.steps_before else ""
        )
        num_averaged = min(len(rewards), NUM_SUMMARY_STEPS)
        lines.append(
            f"{len(rewards)} steps{earlier}: mean reward {first:.2f} in the first {num_averaged}, "
            f"{last:.2f} in the last."
        )
    if outcome.eval_after is not None:
        before = "unknown" if outcome.eval_before is None else f"{outcome.eval_before:.2f}"
        lines.append(
            f"Evaluation, {num_eval_tasks} tasks: mean reward {before} before training, "
            f"{outcome.eval_after:.2f} after."
        )
    if settings.run_dir is not None:
        lines.append(f"Run directory, with checkpoints and server.log: {settings.run_dir}")
    return lines
