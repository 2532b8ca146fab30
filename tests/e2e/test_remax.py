"""A test of `remax` with apps: the app gets the greedy answer, which is the siblings' baseline."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.run_log_reader import read_step_entries
from tests.e2e.hook_files import PREFER_YES, write_hooks
from tests.e2e.processes import Processes
from tests.e2e.stack import post

CONFIG = """
[job]
algorithm = "remax"
num_repeat = 3
batch_size = 1
filter_groups = true
lr = 0.1

[serve]
policy = "greedy"
"""
REQUEST: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Yes or no?"}]}
TIMEOUT_S = 60.0


def test_siblings_train_against_the_greedy_answer_the_app_is_served(tmp_path: Path) -> None:
    hooks = write_hooks(tmp_path / "hooks", PREFER_YES)
    config = tmp_path / "fakevllm.toml"
    config.write_text(CONFIG)
    with Processes(tmp_path) as started:
        server = started.server("--backend", "fake")
        proxy = started.proxy(server, "--config", str(config), "--hooks", str(hooks))
        deadline = time.monotonic() + TIMEOUT_S
        while not (steps := read_step_entries(tmp_path / "server")):
            assert time.monotonic() < deadline, "nothing was trained"
            answer = post(proxy, REQUEST).json()
            assert answer["choices"][0]["message"]["content"].startswith("no")

    (trained,) = steps[0]["groups"]
    assert trained["siblings"] == [1, 2, 3], "the greedy answer is not trained"
    assert steps[0]["metrics"]["theta"] > -1.0, (
        "the siblings with yes were better than the greedy answer"
    )
