"""The command `fakevllm eval`, which measures the model on held-out rows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from fakevllm.cli.control import proxy_url
from fakevllm.cli.options import ConfigFile, ProxyKey, ProxyUrl
from fakevllm_runtime.commands import run_command

MAX_SAMPLES = 64
"""Maximum number of samples per row. The same constant is in evaluation/messages.py, which is
imported only when the command runs."""
Dataset = Annotated[
    Path | None,
    typer.Option(help="JSON Lines file with one row per line. Default: release.eval_dataset."),
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write all numbers and answers to this file.")
]
FailBelow = Annotated[
    float | None, typer.Option(help="Exit with 1 if the mean reward is below this number.")
]
Rewards = Annotated[
    tuple[float, float],
    typer.Option(metavar="LOW HIGH", help="Smallest and largest reward that the hook can return."),
]
SolvedAt = Annotated[
    float | None,
    typer.Option(help="Reward with which a row counts as solved. Default: the largest reward."),
]


def evaluate(
    dataset: Dataset = None,
    field: Annotated[
        str | None, typer.Option(help="Text field of the rows. Default: dataset.field.")
    ] = None,
    url: ProxyUrl = None,
    version: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Version of the weights, up to 4. Default: the served one."),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(min=1, max=MAX_SAMPLES, help="Samples per row, besides one greedy sample."),
    ] = 4,
    json_file: JsonFile = None,
    fail_below: FailBelow = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Evaluate only this many rows, the first ones.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rows at the same time.")] = 4,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of one answer.")
    ] = None,
    reward_range: Rewards = (0.0, 1.0),
    solved_at: SolvedAt = None,
    key: ProxyKey = None,
    config: ConfigFile = None,
) -> None:
    """Measure the model on held-out rows. The proxy samples each row several times and scores the
    samples with your hook. None of the samples is trained."""

    def run() -> None:
        from fakevllm.config.model import load
        from fakevllm.errors import ConfigError
        from fakevllm.evaluation.command import EvalSettings, run_eval
        from fakevllm.statistics.confidence_sequence import RewardRange

        settings = load(config, {})
        file = dataset or settings.release.eval_dataset
        if file is None:
            raise ConfigError(
                "No rows are named: pass --dataset FILE, or set release.eval_dataset."
            )
        low, high = reward_range
        if not -math.inf < low < high < math.inf:
            raise ConfigError("--reward-range needs two finite numbers, the smaller number first.")
        passed = run_eval(
            EvalSettings(
                dataset=file,
                text_field=field or settings.dataset.field,
                url=proxy_url(url, config),
                key=key,
                num_samples=samples,
                json_file=json_file,
                fail_below=fail_below,
                limit=limit,
                concurrency=concurrency,
                max_tokens=max_tokens,
                versions=tuple(version or ()),
                rewards=RewardRange(low, high),
                solved_at=solved_at,
            )
        )
        if not passed:
            raise typer.Exit(1)

    run_command(run)
