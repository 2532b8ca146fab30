"""Measure how many answers of the demo's checkpoints are right, with `transformers.generate`.

    python -m benchmarks.checkpoint_accuracy RUN_DIR... [--samples 16] [--write]

Each RUN_DIR is that of a `fakevllm demo --run-dir RUN_DIR`, by any version of this project. Each of
its checkpoints answers all 64 questions of the demo `--samples` times, at temperature 1. No engine
of this project samples, so two versions of the engine can be compared by what they have trained.
The 200 questions of the demo's own probe are too few for this: their standard error is 0.011 if
0.975 of the answers are right.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.results import conditions, markdown_table, print_table, replace_section
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.demo_model.sums import MAX_ADDEND, Sum, prompt_text

TITLE = "checkpoint_accuracy"
MAX_TOKENS = 24
"""The longest right answer has less than half as many tokens."""

TIED = {"lm_head.weight"}
"""Weights that are also other weights, and that a checkpoint may lack."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR")
    parser.add_argument("--samples", type=int, default=16, help="answers to each question")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    torch: Any = import_module("torch")
    torch.set_num_threads(1)
    transformers: Any = import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)

    header, rows = ["run", "checkpoints", "right answers", "last checkpoint"], list[list[str]]()
    for run_dir in args.run_dirs:
        shares: list[float] = []
        for step, weights in read_checkpoints(run_dir):
            found = model.load_state_dict(weights, strict=False)
            if found.unexpected_keys or set(found.missing_keys) - TIED:
                raise SystemExit(f"{run_dir}: step {step} has no whole weights of the demo's model")
            shares.append(right_share(model, tokenizer, args.samples))
            print(f"{run_dir.name}, step {step}: {shares[-1]:.3f}")
        row = [run_dir.name, str(len(shares)), f"{fmean(shares):.3f}", f"{shares[-1]:.3f}"]
        rows.append(row)
    print_table(header, rows)
    if args.write:
        replace_section(TITLE, f"{text}\n{markdown_table(header, rows)}")


def read_checkpoints(run_dir: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield step and weights of each checkpoint of the run, oldest first."""
    safetensors: Any = import_module("safetensors.torch")
    files = sorted(run_dir.glob("checkpoints/step-*/weights.safetensors"))
    if not files:
        raise SystemExit(f"{run_dir} has no checkpoints: name the --run-dir of a demo")
    for file in files:
        yield int(file.parent.name.removeprefix("step-")), safetensors.load_file(file)


def right_share(model: Any, tokenizer: Any, num_samples: int) -> float:
    """Return the share of right answers to all questions of the demo, `num_samples` each."""
    torch: Any = import_module("torch")
    torch.manual_seed(0)
    numbers = range(MAX_ADDEND + 1)
    sums = [Sum(left, right) for left in numbers for right in numbers]
    prompts = tokenizer(
        [prompt_text(each.question) for each in sums],
        padding=True,
        padding_side="left",
        add_special_tokens=False,
        return_tensors="pt",
    )
    with torch.no_grad():
        sampled = model.generate(
            **prompts,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=MAX_TOKENS,
            num_return_sequences=num_samples,
        )
    answers = sampled[:, prompts["input_ids"].shape[1] :]
    replies = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = [sums[index // num_samples].is_solved_by(reply) for index, reply in enumerate(replies)]
    return sum(right) / len(right)


if __name__ == "__main__":
    main()
