"""The model the demo trains: 0.66 M parameters, answers sums of two small numbers, often wrongly.

`make.py` made it. Importing this loads no torch.
"""

from __future__ import annotations

from pathlib import Path

DEMO_MODEL_DIR = Path(__file__).parent / "weights"
"""A Hugging Face folder, for `--model`."""
