"""The verl trainer's requests to its workers, its errors, and the jobs that it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from fakevllm_adapters.job.loss_spec import LOSS_DEFAULTS
from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.training.failed_step import PartialStep
from fakevllm_server.backends.training.step_updates import UPDATES_MADE
from fakevllm_server.backends.verl.trainer_arguments import STATE_FOLDER
from fakevllm_server.types.backend import BackendError, BackendRefused, Batch, Call, LossSpec

if TYPE_CHECKING:
    from fakevllm_server.backends.verl.trainer import VerlTrainer

JOB = TrainJob(ppo_epochs=2)
BATCH = Batch(1, [Call("g", [5, 6], [7], [-1.0], 0, 1.0, 1.0, 1.0)])
OUT_OF_MEMORY = BackendError("out of memory")


class FailingWorkers:
    """A group of one worker without a model. The request number `at` fails with `error`, and none
    with 0. If `frees` is false, freeing the cache fails, too."""

    num_workers = 1

    def __init__(self, *, at: int, error: Exception = OUT_OF_MEMORY, frees: bool = True) -> None:
        self.requests: list[str] = []
        self.num_freed = 0
        self._at = at
        self._error = error
        self._frees = frees

    def set_grad_clip(self, grad_clip: float) -> None: ...

    def best_sharing_attention(self) -> str:
        return "chains"

    def free_cache(self) -> None:
        self.num_freed += 1
        if not self._frees:
            raise BackendError("nothing can be freed")

    def drop_gradients(self) -> None:
        self._request("drop")

    def forward_backward(self, rows: Any) -> Any:
        self._request("forward")
        return self._values()

    def infer(self, rows: Any, policy: str) -> Any:
        self._request("infer")
        return self._values()

    def restore(self, folder: Path) -> str:
        return "is of another model than --model"

    def _values(self) -> Any:
        values = torch.nested.nested_tensor([torch.full((3,), -1.0)], layout=torch.jagged)
        return {"log_probs": values, "entropy": values}

    def optimizer_step(self, lr: float, weight_decay: float) -> float:
        self._request("update")
        return 1.0

    def _request(self, name: str) -> None:
        self.requests.append(name)
        if len(self.requests) == self._at:
            raise self._error


def _trainer(workers: Any, **settings: Any) -> VerlTrainer:
    from fakevllm_server.backends.verl.trainer import VerlTrainer

    cluster: Any = SimpleNamespace(close=lambda: None)
    return VerlTrainer(cluster, workers, Path("nowhere"), torch.float32, None, **settings)


@pytest.mark.real
# Importing verl and Ray emits warnings about their own code.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("requests", "is_partial"),
    [
        (["drop", "forward"], False),
        (["drop", "forward", "update"], True),
        (["drop", "forward", "update", "forward"], True),
    ],
)
async def test_a_failed_step_is_partial_only_after_an_update_has_begun(
    requests: list[str], is_partial: bool
) -> None:
    workers = FailingWorkers(at=len(requests))
    trainer = _trainer(workers)
    await trainer.boot(JOB)

    with pytest.raises(BackendError, match="out of memory") as failed:
        await trainer.step(BATCH, LossSpec.of(JOB))

    assert isinstance(failed.value, PartialStep) is is_partial
    assert workers.requests == requests
    assert workers.num_freed == 1, "a vLLM on the same GPU wakes up after a failed step, too"


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
async def test_a_step_succeeds_although_the_cache_cannot_be_freed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    trainer = _trainer(FailingWorkers(at=0, frees=False))
    await trainer.boot(JOB)

    metrics = await trainer.step(BATCH, LossSpec.of(JOB))

    assert metrics["grad_norm"] == 1.0
    assert "could not free torch's cache: nothing can be freed" in capsys.readouterr().err


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize("kind", [BackendError, RuntimeError])
async def test_the_cache_is_freed_after_any_error_of_a_step_which_stays_visible(
    kind: type[Exception], frees: bool
) -> None:
    workers = FailingWorkers(at=2, error=kind("raised by the test"), frees=frees)
    trainer = _trainer(workers)
    await trainer.boot(JOB)

    with pytest.raises(kind, match=r"^raised by the test$"):
        await trainer.step(BATCH, LossSpec.of(JOB))

    assert workers.num_freed == 1


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
def test_lost_workers_are_not_asked_to_free_their_cache() -> None:
    from fakevllm_server.backends.verl.worker_group import WorkersLost

    workers = FailingWorkers(at=0)
    with pytest.raises(WorkersLost), _trainer(workers)._freed_cache():
        raise WorkersLost("raised by the test")
    assert workers.num_freed == 0


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"lora_rank": 8},
            "with lora_rank = 0, and the job has lora_rank = 8, lora_alpha = 16, target_modules = "
            '"all-linear": stop the engine, and start it with this job',
        ),
        ({"gradient_checkpointing": True}, "started without the job's gradient_checkpointing: "),
    ],
)
async def test_a_job_that_needs_other_models_than_the_workers_have_is_refused_at_boot(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BackendRefused, match=message):
        await _trainer(FailingWorkers(at=1)).boot(TrainJob(**settings))


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "settings",
    [{"kl_loss_coef": 0.1}, {"use_kl_in_reward": True}, {"loss": "dpo"}],
    ids=["loss", "reward", "demonstrations"],
)
async def test_a_job_that_needs_a_reference_is_refused_if_none_was_kept(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(BackendRefused, match="stop the engine, and start it with this job"):
        await _trainer(FailingWorkers(at=1)).boot(TrainJob(**settings))


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
async def test_a_checkpoint_that_does_not_fit_the_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "workers.json").write_text('{"num_workers": 2}')
    save({"weights.a": torch.ones(3)}, checkpoint_id=tmp_path / STATE_FOLDER, no_dist=True)
    with pytest.raises(BackendError, match=r"is of another model than --model$"):
        await _trainer(FailingWorkers(at=2)).restore(tmp_path)
    (tmp_path / "workers.json").write_text("{}")
    with pytest.raises(BackendError, match="cannot be read as one of the verl trainer"):
        await _trainer(FailingWorkers(at=2)).restore(tmp_path)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("logprob", "requests"),
    [(-9.0, ["drop", "infer", "drop"]), (-1.1, ["drop", "infer", "forward", "update"])],
)
async def test_a_coupled_step_too_far_from_its_engine_makes_no_second_pass(
    logprob: float, requests: list[str]
) -> None:
    job = TrainJob(loss="gpg", rollout_is="token", rollout_is_batch_normalize=True)
    workers = FailingWorkers(at=0)
    trainer = _trainer(workers)
    await trainer.boot(job)
    batch = Batch(1, [Call("g", [5, 6], [7], [logprob], 0, 1.0, 1.0, 1.0)])

    metrics = await trainer.step(batch, LossSpec.of(job))

    assert workers.requests == requests
    assert ("too_far" in metrics) is ("forward" not in requests)
    assert metrics[UPDATES_MADE] == requests.count("update")
    assert workers.num_freed == 1


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("logprob", "requests"),
    [
        (-9.0, ["drop", "infer", "infer"]),
        (-1.1, ["drop", "infer", "infer", "forward", "update", "forward", "update"]),
    ],
)
async def test_mini_batches_are_measured_before_the_first_update(
    logprob: float, requests: list[str]
) -> None:
    job = TrainJob(mini_batch_num=2, bypass_mode=False)
    workers = FailingWorkers(at=0)
    trainer = _trainer(workers)
    await trainer.boot(job)
    calls = [Call(group, [5, 6], [7], [logprob], 0, 1.0, 1.0, 1.0) for group in "ab"]

    metrics = await trainer.step(Batch(1, calls), LossSpec.of(job))

    assert workers.requests == requests
    assert ("too_far" in metrics) is ("forward" not in requests)


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
async def test_the_first_boot_returns_the_line_about_the_workers() -> None:
    trainer = _trainer(FailingWorkers(at=0), start_note="trains with 1 of 2 workers")
    assert await trainer.boot(JOB) == "trains with 1 of 2 workers"
    assert await trainer.boot(JOB) is None


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
async def test_a_trainer_of_all_weights_refuses_to_export_adapters(tmp_path: Path) -> None:
    with pytest.raises(BackendRefused, match="has no adapters to publish: set lora_rank"):
        await _trainer(FailingWorkers(at=1)).export_adapters(tmp_path, "trained")


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("loss", [*LOSS_DEFAULTS, "sft"])
async def test_a_job_with_any_loss_boots(loss: str) -> None:
    workers = FailingWorkers(at=1)
    await _trainer(workers).boot(TrainJob.model_validate({"loss": loss}))
    assert workers.requests == []
