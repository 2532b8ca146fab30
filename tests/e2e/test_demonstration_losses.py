"""The losses sft, dpo and kto on live groups, with the embedded engine."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.run_log_reader import read_step_entries
from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows
from tests.e2e.processes import Process, Processes, wait_until

pytestmark = pytest.mark.slow

CONFIG = """
[job]
num_repeat = 4
batch_size = 3
lr = 1e-3
total_training_steps = 2
{loss}
"""
PREFER_LONG = """
def on_compute_relative_reward(siblings, answers):
    return [min(1.0, len(answer["content"] or "") / 100) for answer in answers]
"""


def train_two_steps(
    processes: Processes, folder: Path, loss: str
) -> tuple[list[dict[str, Any]], Process]:
    """Ask questions until two steps were trained. Return the steps in the run log, and the
    proxy."""
    (folder / "fakevllm.toml").write_text(CONFIG.format(loss=loss))
    hooks = write_hooks(folder / "hooks", PREFER_LONG)
    server = processes.server("--backend", "embedded", "--model", "demo")
    flags = ("--config", str(folder / "fakevllm.toml"), "--hooks", str(hooks))
    proxy = processes.proxy(server, *flags)
    number = 0

    def is_trained() -> bool:
        nonlocal number
        number += 1
        body = {"messages": [{"role": "user", "content": f"What is {number} plus 3?"}]}
        body |= {"model": "demo", "max_tokens": 24}
        reply = httpx.post(f"{proxy.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return len(read_step_entries(folder / "server")) == 2

    wait_until(is_trained, 120.0, "two steps")
    return read_step_entries(folder / "server"), proxy


@pytest.mark.parametrize("loss", ["sft", "dpo", "kto"])
def test_a_demonstration_loss_alone_trains_the_answers_of_live_groups(
    processes: Processes, tmp_path: Path, loss: str
) -> None:
    steps, proxy = train_two_steps(processes, tmp_path, f'loss = "{loss}"')
    per_group = {"sft": {1}, "dpo": {2}, "kto": {2, 3, 4}}[loss]
    for step in steps:
        metrics = step["metrics"]
        taken = [len(group["siblings"]) for group in step["groups"]]
        assert set(taken) <= per_group | {0}
        assert metrics["demonstrations"] == sum(taken)
        assert "mismatch" not in metrics
        if not any(taken):  # The rewards of each group happen to be equal.
            continue
        assert metrics["grad_norm"] > 0 and metrics["skipped"] == 0
        assert metrics["loss"] == metrics["demonstration_loss"] > 0
    losses = [step["metrics"]["loss"] for step in steps if step["metrics"]["demonstrations"]]
    # In the first step with demonstrations, the policy has the starting weights.
    start = {"dpo": math.log(2), "kto": 0.5}.get(loss)
    if start is not None:
        assert losses[:1] == pytest.approx([start] * len(losses[:1]))
    if loss == "dpo":
        assert all(later != pytest.approx(start, abs=1e-9) for later in losses[1:])
    wait_until(
        lambda: rows(proxy, "SELECT COUNT(*) FROM groups WHERE state = 'trained'")[0][0] == 6,
        60.0,
        "the trained groups in the ledger",
    )


def test_a_demonstration_loss_beside_the_policy_loss_trains_all_siblings(
    processes: Processes, tmp_path: Path
) -> None:
    settings = 'demonstration_loss = "sft"\ndemonstration_loss_coef = 0.1'
    steps, _ = train_two_steps(processes, tmp_path, settings)
    for step in steps:
        metrics = step["metrics"]
        assert {len(group["siblings"]) for group in step["groups"]} == {4}
        assert 0 <= metrics["demonstrations"] <= 3
        assert metrics["sample_coverage"] == 1
        assert metrics["mismatch"] < 1e-3
        # At temperature 1, the demonstrations are tokens that go through the model anyway.
        assert metrics["rho"] > 1


def test_the_fake_engine_refuses_a_demonstration_loss_with_one_line(
    processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "fakevllm.toml").write_text('[job]\nloss = "sft"\n')
    hooks = write_hooks(tmp_path / "hooks", PREFER_LONG)
    server = processes.server("--backend", "fake")
    flags = ("--config", str(tmp_path / "fakevllm.toml"), "--hooks", str(hooks))
    proxy = processes.proxy(server, *flags, wait=False)
    wait_until(lambda: "The fake engine has no loss sft: use" in proxy.log, 30.0, "the refusal")
