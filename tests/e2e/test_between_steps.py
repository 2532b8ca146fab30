"""With `release.evaluation = "between_steps"`, training waits while a version is evaluated. The
engine needs only one set of weights. The fake engine samples."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.hook_files import PREFER_YES
from tests.e2e.ledgers import rows
from tests.e2e.processes import Process, Processes, wait_until
from tests.e2e.release_stack import (
    GAMEABLE,
    Talk,
    history,
    proxy_flags,
    release,
    stats,
    write_held_out,
)

pytestmark = pytest.mark.slow

BETWEEN_STEPS = """
[release]
mode = "gated"
evaluation = "between_steps"
eval_dataset = "{rows}"
evaluate_every = 3
eval_samples = 2
max_samples = 80
margin = {margin}
"""
NUM_DRAWS = 40
THREE_FOR_APPS = """
def on_compute_relative_reward(siblings, answers):
    if "held-out" in siblings[0].messages[-1]["content"]:
        return [float((answer["content"] or "").startswith("yes")) for answer in answers]
    return [3.0 * (number % 2) for number in range(len(answers))]
"""
"""A hook whose rewards for apps' requests are outside of the declared range. Its rewards for
held-out rows are within the range."""
ANSWERED = """
    SELECT COUNT(*) FROM groups
    WHERE kind = 'eval' AND eval_id LIKE 'gate-reference-' || ? || '-%'
"""
"""SQL that counts the answered rows of all references whose names begin with the given version and
decision."""


def flags(folder: Path, hook: str = PREFER_YES, margin: float = 0.2) -> list[str]:
    settings = BETWEEN_STEPS.format(rows=write_held_out(folder), margin=margin)
    return proxy_flags(folder, settings, hook)


def releases(server: Process) -> dict[str, Any]:
    return httpx.get(f"{server.url}/releases", timeout=30).json()


def num_answered(proxy: Process, released: int, decision: int | None = None) -> int:
    """Return the number of held-out rows that a released version has answered as a reference. With
    `decision`, count only the rows of the reference that was made after the decision with this
    number."""
    name = f"{released}" if decision is None else f"{released}-{decision}"
    return rows(proxy, ANSWERED, name)[0][0]


def test_a_version_is_released_after_training_has_waited_for_its_evaluation(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *flags(tmp_path))
    assert releases(server)["training_limit"] == 0, "training waits before the first request"
    talk = Talk(proxy)
    record = talk.ask_until_decided(server, "released")
    assert (record["decided_by"], record["version"]) == ("gate", 3)
    assert record["evidence"]["released"] == 0
    assert num_answered(proxy, 0) == NUM_DRAWS
    talk.ask_until_decided(server, "candidate", after=record["number"])
    assert num_answered(proxy, 3) == NUM_DRAWS
    assert releases(server)["training_limit"] == 6
    query = "SELECT DISTINCT arm FROM groups WHERE kind IS NOT 'eval' AND state = 'trained'"
    assert [row[0] for row in rows(proxy, query)] == [None]  # there are no arms
    assert stats(proxy)["release"]["has_released_arm"] is False


def test_a_worse_version_is_rejected_and_the_restored_weights_make_the_next_reference(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *flags(tmp_path, GAMEABLE, margin=0.01))
    record = Talk(proxy).ask_until_decided(server, "rejected")
    assert record["evidence"]["restored"] == 0
    number = record["number"]
    wait_until(lambda: num_answered(proxy, 0, number) == NUM_DRAWS, 60.0, "the next reference")
    assert max(releases(server)["released_copies"]) > record["version"]
    assert releases(server)["released"] == 0


def test_after_kills_of_proxy_and_server_the_cycle_continues_and_no_version_is_skipped(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *flags(tmp_path))
    wait_until(lambda: num_answered(proxy, 0) >= 8, 60.0, "the first rows of the reference")
    assert proxy.kill() == -signal.SIGKILL
    proxy = processes.proxy(server, *flags(tmp_path), folder="proxy")
    wait_until(lambda: num_answered(proxy, 0) >= 24, 60.0, "more rows of the reference")
    assert server.kill() == -signal.SIGKILL
    server = processes.server("--backend", "fake", folder="server", port=server.port)
    talk = Talk(proxy)
    record = talk.ask_until_decided(server, "candidate")
    assert (record["version"], releases(server)["training_limit"]) == (3, 3)
    assert NUM_DRAWS <= num_answered(proxy, 0) <= NUM_DRAWS + 8  # eight rows at a time
    assert server.kill() == -signal.SIGKILL
    server = processes.server("--backend", "fake", folder="server", port=server.port)
    record = talk.ask_until_decided(server, "released")
    assert (record["version"], record["evidence"]["released"]) == (3, 0)


def test_the_mode_continuous_removes_the_limit(processes: Processes, tmp_path: Path) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *flags(tmp_path))
    wait_until(lambda: releases(server)["training_limit"] == 0, 60.0, "the limit")
    proxy.stop()
    proxy = processes.proxy(server, *proxy_flags(tmp_path, ""), folder="proxy")
    talk = Talk(proxy)

    def is_trained() -> bool:
        talk.ask()
        query = "SELECT COUNT(*) FROM groups WHERE state = 'trained'"
        return rows(proxy, query)[0][0] > 0

    wait_until(is_trained, 60.0, "a trained group")
    assert releases(server)["training_limit"] is None


def test_a_gate_that_is_turned_on_in_a_run_asks_for_one_command(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *proxy_flags(tmp_path, ""))
    talk = Talk(proxy)

    def has_steps() -> bool:
        talk.ask()
        return stats(proxy)["engine"]["weight_version"] >= 2

    wait_until(has_steps, 60.0, "two steps")
    proxy.stop()
    proxy = processes.proxy(server, *flags(tmp_path), folder="proxy")

    def trouble() -> str:
        return stats(proxy)["release"]["trouble"] or ""

    wait_until(lambda: "fakevllm release promote" in trouble(), 60.0, "the line of advice")
    version = stats(proxy)["engine"]["weight_version"]
    assert f"fakevllm release promote {version}" in trouble()
    code, output = release(server.url, "promote", str(version))
    assert code == 0, output
    wait_until(lambda: num_answered(proxy, version) == NUM_DRAWS, 60.0, "the reference")
    assert history(server)[0]["decided_by"] == "operator"


def test_a_reward_of_an_app_outside_of_the_range_stops_releases(
    processes: Processes, tmp_path: Path
) -> None:
    server = processes.server("--backend", "fake")
    proxy = processes.proxy(server, *flags(tmp_path, THREE_FOR_APPS))
    Talk(proxy).ask()

    def trouble() -> str:
        return stats(proxy)["release"]["trouble"] or ""

    wait_until(lambda: "reward 3, outside of release.reward_range" in trouble(), 60.0, "the line")
    assert history(server) == []
