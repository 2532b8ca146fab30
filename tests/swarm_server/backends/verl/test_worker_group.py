"""How long the trainer waits for a worker after another one has answered."""

# pyright: reportMissingImports=false
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fakevllm_server.types.weight_transfer import JSON, TransferTarget

pytestmark = [pytest.mark.real]

TARGET = TransferTarget("nowhere", JSON)


class TwoWorkers:
    """Two workers of Ray without processes. The first one answers each call, and the second one
    none."""

    def execute_all_async(self, method: str, *arguments: object) -> list[str]:
        return ["first", "second"]


def wait(futures: list[str], timeout: float | None) -> tuple[list[str], list[str]]:
    """Answer as `ray.wait` does after `timeout` seconds, without waiting."""
    return [one for one in futures if one == "first"], [one for one in futures if one == "second"]


# Importing verl and Ray emits warnings about their own code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("timeout_s", "limit"), [(30.0, "660 s"), (900.0, "900 s")])
def test_a_worker_that_sends_may_wait_for_two_answers_of_vllm(
    timeout_s: float, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fakevllm_server.backends.verl import worker_group

    workers = worker_group.WorkerGroup.__new__(worker_group.WorkerGroup)
    own: Any = workers
    own.num_workers, own._sender, own._group = 2, 0, TwoWorkers()
    own._collective_timeout_s = timeout_s
    monkeypatch.setattr(worker_group.ray, "wait", wait)
    monkeypatch.setattr(worker_group.ray, "get", lambda futures: futures)

    with pytest.raises(worker_group.WorkersLost, match=f"1 of 2 workers .* for {limit}$"):
        workers.send_weights(TARGET, torch.float32, Path("nowhere"))
    with pytest.raises(worker_group.WorkersLost, match=f"for {timeout_s:g} s$"):
        workers.free_cache()


class DeathNoticed:
    """Ray, when a worker has failed because its peer died with its machine. Ray notices the death
    some time later."""

    NOTICED_AFTER_S = 15.0

    def __init__(self, failed: Exception, death: Exception) -> None:
        self._errors = {"first": failed, "second": death}

    def wait(
        self, futures: list[str], timeout: float | None, num_returns: int = 1
    ) -> tuple[list[str], list[str]]:
        if "first" in futures or (timeout is not None and timeout > self.NOTICED_AFTER_S):
            return futures[:1], futures[1:]
        return [], futures

    def get(self, future: str) -> None:
        raise self._errors[future]


@pytest.mark.filterwarnings("ignore")
def test_a_dead_worker_is_named_with_its_node_and_not_the_failure_of_its_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.exceptions import ActorUnavailableError, RayTaskError

    from fakevllm_server.backends.verl import worker_group

    workers = worker_group.WorkerGroup.__new__(worker_group.WorkerGroup)
    own: Any = workers
    own.num_workers, own._group, own._nodes = 2, TwoWorkers(), ["10.0.0.1", "10.0.0.2"]
    own._collective_timeout_s = 30.0
    failed = RayTaskError("step", "Traceback", RuntimeError("connection reset"))
    ray = DeathNoticed(failed, ActorUnavailableError("ids and codes", b"x" * 16))
    monkeypatch.setattr(worker_group.ray, "wait", ray.wait)
    monkeypatch.setattr(worker_group.ray, "get", ray.get)
    with pytest.raises(worker_group.WorkersLost) as lost:
        workers.free_cache()
    assert str(lost.value) == (
        "a Ray worker of the verl trainer has died (2 of 2, on Ray node 10.0.0.2): "
        "Ray cannot reach it"
    )
