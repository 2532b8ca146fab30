"""Train a model from nothing on a GPU, and then by reinforcement learning through the proxy.

    .ci/gpu learn --out gpu_learn                          # needs CUDA
    .ci/gpu learn --out gpu_learn --device cpu             # the same over a small model
    .ci/gpu learn --out gpu_learn --device cpu --tiny      # the same with very few steps

The part `model` trains a model from nothing on made-up sums, countdown and tool calls. Half of the
replies that it is trained on are wrong. Then four arms continue from this model at the same time,
each with a server and a proxy of its own. `frozen` makes no updates, `shuffled` permutes the
rewards within each group, and `n2` and `n8` train with 2 and 8 answers to each question. All arms
take the same number of steps, and sample the same number of answers for each step. Each arm is
measured on held-out questions before and after its steps.

A part that takes longer than its limit is killed, and a part whose packages are missing is skipped.
The output of each part is written to `OUT/NAME.log`, and the figures to `OUT/learn.json` and
`OUT/learn.md`. The exit code is 1 if a part failed, or if an arm did not learn as expected. Arms
over the tiny model take so few steps that only `frozen` has an expectation: it must not change.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import gpu_machine
from benchmarks.gpu_learn_parts.arms import ARMS, ArmRun
from benchmarks.gpu_learn_parts.comparison import ArmReport, table_of
from benchmarks.gpu_learn_parts.sizes import SIZES, Size
from benchmarks.part_process import ENGINE, Part, PartResult, run_together, skipped
from benchmarks.results import markdown_table, print_table

PARTS = "benchmarks.gpu_learn_parts"
MODEL = "model"
SIZE_BY_DEVICE = {"cuda": "full", "cpu": "small"}
RESERVE_S = 75.0
"""Seconds after the training of the arms for the last measurement and for stopping."""
LEGEND = (
    "The shares are those of right answers at temperature 1 to held-out questions, which no "
    "training has seen. Intervals are 95 %. The change is the mean of the changes of single "
    "questions. N is the number of answers to each question in training. All arms begin with the "
    "same model, take the same number of steps unless the time limit stops them, and sample the "
    "same number of answers for each step."
)


def main() -> int:
    parser = gpu_machine.create_parser(__doc__, "gpu_learn")
    args = gpu_machine.parse(parser, needs_tiny=False)
    chosen = gpu_machine.chosen_parts(parser, args, [MODEL, *ARMS])
    deadline = time.monotonic() + gpu_machine.TOTAL_S
    size_name = "tiny" if args.tiny else SIZE_BY_DEVICE[args.device]
    out: Path = args.out.resolve()
    for name in chosen:  # the results of an earlier run
        shutil.rmtree(out / name, ignore_errors=True)
        (out / f"{name}.json").unlink(missing_ok=True)
    common = f"--size {size_name} --device {args.device} --out {{out}}"
    results: list[PartResult] = []
    if MODEL in chosen:
        results += run_together([_model_part(common)], out, deadline)
    arms = [_arm_part(name, common, deadline) for name in ARMS if name in chosen]
    if (out / MODEL / "config.json").exists():
        results += run_together(arms, out, deadline)
    else:
        results += [skipped(arm, f"there is no model in {out / MODEL}") for arm in arms]
    reports = _reports(out, [arm.name for arm in arms], SIZES[size_name])
    _write(args, out, size_name, results, reports)
    has_problem = any(report.problem is not None for report in reports)
    return gpu_machine.exit_code(results) or int(has_problem)


def _model_part(common: str) -> Part:
    command = f"-m {PARTS}.pretraining {common}/{MODEL} --json {{out}}/{MODEL}.json"
    return Part(MODEL, command, ("torch", "transformers", "tokenizers"), limit_s=250.0)


def _arm_part(name: str, common: str, deadline: float) -> Part:
    limit_s = max(0.0, deadline - time.monotonic() - RESERVE_S)
    command = f"-m {PARTS}.arm_run --name {name} {common}/{name} --json {{out}}/{name}.json"
    command += f" --model {{out}}/{MODEL} --limit-s {limit_s:.0f}"
    return Part(name, command, ENGINE, limit_s=gpu_machine.TOTAL_S)


def _reports(out: Path, names: Sequence[str], size: Size) -> list[ArmReport]:
    """Return the reports of the arms that have finished."""
    return [
        ArmReport(name, ARMS[name], ArmRun(**json.loads(file.read_text())), size.is_judged)
        for name in names
        if (file := out / f"{name}.json").exists()
    ]


def _write(
    args: Any,
    out: Path,
    size_name: str,
    results: Sequence[PartResult],
    reports: Sequence[ArmReport],
) -> None:
    model_file = out / f"{MODEL}.json"
    model = json.loads(model_file.read_text()) if model_file.exists() else None
    figures = {
        "size": size_name,
        "settings": asdict(SIZES[size_name]),
        "model": model,
        "arms": [report.as_json() for report in reports],
    }
    text = ""
    if model is not None:
        text += (
            f"The model has {model['parameters'] / 1e6:.1f} million parameters. It was trained "
            f"from nothing on {model['replies']:,} replies in {model['steps']:,} steps, in "
            f"{model['seconds']:.0f} s. {LEGEND}\n\n"
        )
    if reports:
        header, rows = table_of(reports)
        print_table(header, rows, "right answers to held-out questions")
        text += markdown_table(header, rows) + "\n"
    machine = gpu_machine.describe_machine(args.device)
    gpu_machine.write_results(out, "learn", machine, results, figures, text)


if __name__ == "__main__":
    sys.exit(main())
