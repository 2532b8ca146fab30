"""Simulate users: send the questions of dataset.jsonl through the proxy.

    python mock_user_request.py [--epochs 5] [--url http://127.0.0.1:8000]

All further flags are those of `fakevllm replay`. For example, --app 'my-app --ask {question}'
starts your app for each question.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate users of the app.")
    parser.add_argument("--epochs", type=int, default=5, help="passes through the dataset")
    known, others = parser.parse_known_args()
    os.chdir(HERE)  # here is fakevllm.toml, which has the proxy's address
    replay = [sys.executable, "-m", "fakevllm", "replay", "--dataset", "dataset.jsonl", "--fresh"]
    os.execv(sys.executable, [*replay, "--epochs", str(known.epochs), *others])


if __name__ == "__main__":
    main()
