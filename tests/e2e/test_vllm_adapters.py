"""A job that trains adapters with vLLM: versions are sampled side by side, also after a restart of
vLLM."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hook_files import write_hooks
from tests.e2e.ledgers import rows
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.test_real_engines import vllm_processes

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(900)]

READY_TIMEOUT_S = 400.0
CONFIG = """[job]
batch_size = 1
num_repeat = 4
lora_rank = 8
lr = 0.02
save_freq = 1
"""
HOOK = """
def on_compute_relative_reward(valid_results, all_answers):
    return [float(len(answer["content"] or "")) for answer in all_answers]
"""
QUESTION: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is 3 plus 4?"}],
    "max_tokens": 8,
}


@pytest.fixture
def processes(tmp_path: Path) -> Generator[Processes]:
    with Processes(tmp_path) as started:
        yield started


def test_versions_of_a_job_with_adapters_answer_side_by_side_in_vllm(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "vllm", "--model", "demo")
    (tmp_path / "fakevllm.toml").write_text(CONFIG)
    hooks = write_hooks(tmp_path / "hooks", HOOK)
    config = str(tmp_path / "fakevllm.toml")
    proxy = processes.proxy(server, "--config", config, "--hooks", str(hooks), wait=False)
    proxy.wait_until_healthy(READY_TIMEOUT_S)

    def num_steps() -> int:
        answer = httpx.post(f"{proxy.url}/v1/chat/completions", json=QUESTION, timeout=100)
        assert answer.status_code == 200 and answer.json()["model"] == "demo"
        return rows(proxy, "SELECT COUNT(DISTINCT trained_step) FROM groups")[0][0]

    wait_until(lambda: num_steps() >= 3, 120.0, "three steps")
    versions = (0, newest_saved(server))
    before = {version: greedy_logprobs(server, loaded(server, version)) for version in versions}
    assert before[versions[0]] != pytest.approx(before[versions[1]], abs=1e-4)
    for pid in vllm_processes(server):
        os.kill(pid, signal.SIGKILL)
    last = versions[1] + 1
    wait_until(lambda: num_steps() > last, READY_TIMEOUT_S, "steps after the restart")
    for version in reversed(versions):
        again = greedy_logprobs(server, loaded(server, version))
        assert again == pytest.approx(before[version], abs=1e-4)
    for field in ("prompt_logprobs", "echo"):
        body = {"model": "demo", "prompt": "2 + 2 =", "logprobs": 1, field: 1}
        refusal = httpx.post(f"{server.url}/v1/completions", json=body, timeout=100)
        assert refusal.status_code == 400 and "holds adapters" in refusal.text
    query = "SELECT COUNT(*) FROM calls WHERE untrainable IS NOT NULL"
    assert rows(proxy, query)[0][0] == 0


def newest_saved(server: Process) -> int:
    """Return the newest version with a checkpoint."""
    reply = httpx.post(f"{server.url}/load_policy", json={"version": 10**6}, timeout=120).json()
    return int(re.findall(r"\d+", reply["failure_reason"].partition("can be sampled:")[2])[-1])


def loaded(server: Process, version: int) -> str:
    """Let the server load a version and keep its checkpoint. Return the model's name that selects
    the version."""
    body = {"version": version, "pinned": True}
    reply = httpx.post(f"{server.url}/load_policy", json=body, timeout=120).json()
    assert reply["success"], reply
    assert reply["model"] == f"policy-{version}"
    return reply["model"]


def greedy_logprobs(server: Process, model: str) -> list[float]:
    body = QUESTION | {"model": model, "temperature": 0, "logprobs": True, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=100).json()
    assert answer["model"] == model
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
