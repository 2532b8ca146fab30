"""The page with the plans of three models, as `fakevllm-server plan` prints them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from docs.reference_pages.markdown import Page, section
from fakevllm_server.cli.plan import calculate, plan_lines

FOLDER = Path(__file__).parent / "plan_examples"
INTRODUCTION = """\
This page shows what `fakevllm-server plan` prints for three models: which GPUs sample, which \
train, and what each GPU holds, with the arithmetic. \
[several_gpus.md](../several_gpus.md#2-divide-and-plan-the-gpus) explains the keys and the parts. \
All figures are calculated. Those marked *estimate* are guesses. None was measured on a GPU. To \
print a plan yourself, run this from the root of a clone:

    fakevllm-server plan --config docs/reference_pages/plan_examples/0.6b.toml \\
        --model docs/reference_pages/plan_examples/0.6b"""


class Example(NamedTuple):
    """A model and a division of GPUs."""

    name: str
    """Name of the model folder and, with `.toml`, of the configuration file."""
    title: str
    text: str


EXAMPLES = (
    Example(
        "0.6b",
        "0.6 B on one GPU",
        "vLLM and the embedded trainer share the GPU. The model has the shape of Qwen3-0.6B.",
    ),
    Example(
        "7b",
        "7 B on eight GPUs",
        "vLLM has two GPUs, and six GPUs train with verl. The model has the shape of Qwen2.5-7B.",
    ),
    Example(
        "70b",
        "70 B on 64 GPUs",
        "Two vLLM servers have eight GPUs each, and 48 GPUs train with verl. The model has the "
        "shape of Llama-3.1-70B. This version calculates this plan, but does not start it, "
        "because the vLLM servers need more GPUs than the first machine has.",
    ),
)


def page() -> Page:
    """Return the page with one section for each example."""
    return Page("Plans for GPUs", INTRODUCTION, [_section(example) for example in EXAMPLES])


def _section(example: Example) -> str:
    file = FOLDER / f"{example.name}.toml"
    settings = file.read_text(encoding="utf-8").strip()
    plan = calculate(file, str(FOLDER / example.name), None)
    assert plan.fits, f"the example {example.name} does not fit: {plan.problems}"
    output = "\n".join(plan_lines(plan))
    return section(example.title, example.text, f"```toml\n{settings}\n```", f"```\n{output}\n```")
