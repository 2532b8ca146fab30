"""The language model of `fakevllm demo`, with 0.66 M parameters. The model answers questions about
sums of two small numbers, often wrongly.

`make.py` creates the model, and `sums.py` defines its task. Importing this package loads no torch.
"""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL_DIR = Path(__file__).parent / "weights"
"""The model as a Hugging Face folder, for `--model`."""
