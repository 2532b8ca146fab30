"""What the verl trainer asks of its workers in a step, and tells of one that fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fakevllm_adapters.swarm import TrainJob
from fakevllm_server.backends.base import BackendError, Batch, Call, LossSpec
from fakevllm_server.backends.partial_step import PartialStep

JOB = TrainJob(ppo_epochs=2)
BATCH = Batch(1, [Call("g", [5, 6], [7], [-1.0], 0, 1.0, 1.0, 1.0)])


class WorkersThatFail:
    """One worker without a model, that fails at one of the calls of a step."""

    num_workers = 1

    def __init__(self, *, at: int) -> None:
        self.asked: list[str] = []
        self._at = at

    def set_loss(self, loss: object) -> None: ...
    def set_grad_clip(self, grad_clip: float) -> None: ...

    def drop_gradients(self) -> None:
        self._ask("drop")

    def forward_backward(self, rows: Any) -> tuple[float, Any]:
        self._ask("forward")
        each = torch.nested.nested_tensor([torch.full((3,), -1.0)], layout=torch.jagged)
        return 0.5, {"log_probs": each, "entropy": each}

    def optimizer_step(self, lr: float, weight_decay: float) -> float:
        self._ask("update")
        return 1.0

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if len(self.asked) == self._at:
            raise BackendError("out of memory")


@pytest.mark.real
# Importing verl and Ray warns of their own code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("asked", "is_partial"),
    [
        (["drop", "forward"], False),
        (["drop", "forward", "update"], True),
        (["drop", "forward", "update", "forward"], True),
    ],
)
async def test_a_step_that_failed_tells_whether_anything_moved(
    asked: list[str], is_partial: bool
) -> None:
    from fakevllm_server.backends.verl.engine import VerlTrainer

    workers: Any = WorkersThatFail(at=len(asked))
    cluster: Any = SimpleNamespace(close=lambda: None)
    trainer = VerlTrainer(cluster, workers, Path("nowhere"), torch.float32, None)
    await trainer.boot(JOB)

    with pytest.raises(BackendError, match="out of memory") as failed:
        await trainer.step(BATCH, LossSpec.of(JOB))

    assert isinstance(failed.value, PartialStep) is is_partial
    assert workers.asked == asked
