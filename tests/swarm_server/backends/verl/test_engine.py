"""What the verl trainer asks of its workers in a step, and tells of one that fails."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.training.partial_step import PartialStep
from fakevllm_server.types.backend import BackendError, BackendRefused, Batch, Call, LossSpec

if TYPE_CHECKING:
    from fakevllm_server.backends.verl.engine import VerlTrainer

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


def _trainer(workers: Any) -> VerlTrainer:
    from fakevllm_server.backends.verl.engine import VerlTrainer

    cluster: Any = SimpleNamespace(close=lambda: None)
    return VerlTrainer(cluster, workers, Path("nowhere"), torch.float32, None)


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
    workers = WorkersThatFail(at=len(asked))
    trainer = _trainer(workers)
    await trainer.boot(JOB)

    with pytest.raises(BackendError, match="out of memory") as failed:
        await trainer.step(BATCH, LossSpec.of(JOB))

    assert isinstance(failed.value, PartialStep) is is_partial
    assert workers.asked == asked


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"loss": "gspo"}, "loss = gspo, loss_agg_mode = seq-mean-token-mean: take --trainer emb"),
        ({"loss_unit": "call"}, "asked for loss_unit = call: take"),
        ({"entropy_coeff": 0.01}, "asked for entropy_coeff = 0.01: take"),
        ({"bypass_mode": False, "rollout_is": "token"}, "bypass_mode = false, rollout_is = token"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 2}, "rollout_rs = token_k1"),
    ],
)
async def test_what_its_rows_cannot_carry_is_told_by_name_before_any_step(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(BackendRefused, match=told):
        await _trainer(WorkersThatFail(at=1)).boot(TrainJob(**settings))


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"lora_rank": 8}, "lora_rank is not the verl trainer's, it trains all weights: take it"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing is not .* --trainer embedded"),
    ],
)
async def test_what_its_models_were_not_made_for_is_told_by_name_before_any_step(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(BackendRefused, match=told):
        await _trainer(WorkersThatFail(at=1)).boot(TrainJob(**settings))


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings", [{"kl_loss_coef": 0.1}, {"use_kl_in_reward": True}], ids=["loss", "reward"]
)
async def test_a_job_that_needs_a_reference_is_refused_where_none_was_kept(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(BackendRefused, match="stop the engine, and start it with this job"):
        await _trainer(WorkersThatFail(at=1)).boot(TrainJob(**settings))


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
async def test_a_checkpoint_of_other_workers_is_refused_and_no_older_one_is_tried(
    tmp_path: Path,
) -> None:
    (tmp_path / "fsdp_config.json").write_text('{"world_size": 2}')
    told = "is of 2 workers, and 1 run: start with --trainer-arg=--num-workers=2$"
    with pytest.raises(BackendRefused, match=told):
        await _trainer(WorkersThatFail(at=1)).restore(tmp_path)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", ["vanilla", "cispo", "gpg"])
async def test_the_losses_it_carries_boot(loss: str) -> None:
    workers = WorkersThatFail(at=1)
    await _trainer(workers).boot(TrainJob.model_validate({"loss": loss}))
    assert workers.asked == []
