"""The language model of the command `fakevllm demo`. It has 0.66 million parameters, and answers
questions about sums of two small numbers, often wrongly.

`make.py` creates the model, and `sums.py` defines its task. Importing this package does not import
torch.
"""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL_DIR = Path(__file__).parent / "weights"
"""The model as a Hugging Face folder, for `--model`."""
