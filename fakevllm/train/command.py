"""`fakevllm train` from start to end."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from rich.console import Console

from fakevllm.runtime.engine_choice import EngineChoice
from fakevllm.train import named, plan
from fakevllm.train.config import Settings, load
from fakevllm.train.play import Material, Outcome
from fakevllm.train.running import train

NUM_SHOWN_STEPS = 5
"""At each end of a run; one step's mean says little."""


def run_train(conf: Path) -> Outcome:
    """Raises UserError before anything is started for what cannot work."""
    console = Console()
    settings = load(conf)
    for warning in settings.warnings:
        console.print(f"the job's {warning}", style="yellow", highlight=False, markup=False)
    if settings.server.url is None:  # before a dataset is fetched
        EngineChoice.resolve(settings.server.backend).check_installed()
    material = material_of(settings)
    try:
        outcome = train(settings, material, console)
    except KeyboardInterrupt:
        console.print(f"Stopped. Go on: fakevllm train --conf {conf}", highlight=False)
        raise
    for line in told(outcome, settings, material.num_steps, len(material.eval_tasks)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return outcome


def material_of(settings: Settings) -> Material:
    """Raises ConfigError."""
    of_train, folder = settings.train, settings.file.parent
    workflow = named.workflow(of_train.workflow, folder)
    tasks = named.tasks(of_train.dataset, of_train.field, folder)
    num_steps = plan.num_steps(settings.job, of_train.epochs, len(tasks))
    is_evaluated = of_train.eval_dataset is not None
    return Material(
        # the server saves after its last step
        job=settings.job.model_copy(update={"total_training_steps": num_steps}),
        workflow=workflow,
        name=of_train.workflow,
        tasks=tasks,
        eval_tasks=named.tasks(of_train.eval_dataset or "", of_train.field, folder)
        if is_evaluated
        else (),
        num_steps=num_steps,
        max_parallel=of_train.max_parallel,
    )


def told(outcome: Outcome, settings: Settings, num_steps: int, num_evaluated: int) -> list[str]:
    """What a run leaves behind, for people. Pure."""
    lines: list[str] = []
    rewards = outcome.rewards
    if not rewards:
        lines.append(f"All {num_steps} steps were made before.")
    else:
        first, last = fmean(rewards[:NUM_SHOWN_STEPS]), fmean(rewards[-NUM_SHOWN_STEPS:])
        begun = f" (of {num_steps}; the others before)" if outcome.steps_before else ""
        lines.append(
            f"{len(rewards)} steps{begun}: mean reward {first:.2f} in the first "
            f"{min(len(rewards), NUM_SHOWN_STEPS)}, {last:.2f} in the last."
        )
    if outcome.after is not None:
        before = "not known" if outcome.before is None else f"{outcome.before:.2f}"
        lines.append(
            f"Evaluation, {num_evaluated} tasks: {before} before, {outcome.after:.2f} after."
        )
    if settings.run_dir is not None:
        lines.append(f"The run, its checkpoints and the server's log: {settings.run_dir}")
    return lines
