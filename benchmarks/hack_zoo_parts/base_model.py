"""Train the base model of all runs from nothing: a model with many habits, good and bad ones.

python -m benchmarks.hack_zoo_parts.base_model --out FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_learn_parts.pretraining import BatchSource, make_model, make_tokenizer, train
from benchmarks.gpu_learn_parts.sizes import ModelShape, Pretraining
from benchmarks.hack_zoo_parts.tasks import KINDS
from fakevllm_server.backends.embedded.demo_model import make

SHAPE = ModelShape(128, 384, 3, 4, 2, 32, vocab=512)
"""Dimensions of the demo's model."""
PLAN = Pretraining(num_steps=500, limit_s=1e9, batch_tokens=1536, lr=3e-3)
"""The number of steps limits the training, and not the time, so that each machine makes the same
model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads are slower on cores that others use
    torch.manual_seed(0)
    tokenizer = make_tokenizer(KINDS, SHAPE.vocab)
    model: Any = make_model(SHAPE, tokenizer)
    source = BatchSource(KINDS, tokenizer, PLAN.batch_tokens)
    figures = train(model, source, PLAN, torch.device("cpu"))
    make.write(model, tokenizer, options.out)
    print(f"wrote {options.out}: {figures}")


if __name__ == "__main__":
    main()
