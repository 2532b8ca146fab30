"""LoRA: adapters train, and all other weights stay unchanged."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from swarm_server.backends.embedded.engine_helpers import (
    SPEC,
    EngineMaker,
    collect,
    finish,
    load,
    plain_logprobs,
    random_calls,
    train,
    weights,
)
from swarm_server.backends.embedded.lora_helpers import IDS, LORA, QUICK, new_trainer, step, trained

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.model_folder import open_model_folder
from fakevllm_server.backends.embedded.train import checkpoint
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.backends.embedded.weights import MergedWeights, named_weights
from fakevllm_server.types.backend import BackendError, BackendRefused, Batch, LossSpec, PolicyName
from fakevllm_server.types.sampling import Sampling


def test_only_adapters_train_and_only_they_are_in_the_optimiser(tiny_folder: Path) -> None:
    trainer = new_trainer(tiny_folder)
    trainer.boot(TrainJob(**LORA))
    before = {name: tensor.clone() for name, tensor in named_weights(trainer.model).items()}

    step(trainer, 0)

    after = named_weights(trainer.model)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    adapters = {name for name in after if ".lora_" in name}
    assert moved == adapters and len(adapters) == 2 * 7 * 2, "A and B of 7 layers in 2 blocks"
    (group,) = trainer.optimizer.param_groups
    assert {id(one) for one in group["params"]} == {id(after[name]) for name in adapters}


def test_the_jobs_seed_decides_the_initial_adapters(tiny_folder: Path) -> None:
    def begun(seed: int) -> torch.Tensor:
        trainer = new_trainer(tiny_folder)
        trainer.boot(TrainJob(**LORA, seed=seed))
        return torch.cat([p.flatten() for p in trainer.model.parameters() if p.requires_grad])

    assert torch.equal(begun(1), begun(1)) and not torch.equal(begun(1), begun(2))


def test_a_new_adapter_changes_no_log_probability(tiny_folder: Path) -> None:
    trainer = new_trainer(tiny_folder)
    trainer.boot(TrainJob(**LORA))
    assert torch.equal(plain_logprobs(trainer.model, IDS), plain_logprobs(load(tiny_folder), IDS))


def test_merged_weights_have_the_models_names_and_include_the_adapters(
    tiny_folder: Path,
) -> None:
    trainer = trained(tiny_folder)
    plain = load(tiny_folder)
    base, merged = named_weights(plain), MergedWeights(trainer.model)

    assert merged.shapes == MergedWeights(plain).shapes
    for name in base:
        is_adapted = name.endswith("_proj.weight")
        assert torch.equal(merged[name], base[name]) is not is_adapted, name
    place = "model.layers.1.mlp.up_proj"
    a, b = (trainer.model.get_parameter(f"{place}.lora_{which}.default.weight") for which in "AB")
    expected = base[f"{place}.weight"] + 8 / 4 * b @ a
    torch.testing.assert_close(merged[f"{place}.weight"], expected, rtol=0, atol=1e-6)
    with torch.no_grad():
        for name, tensor in base.items():
            tensor.copy_(merged[name])
    now, of_trainer = plain_logprobs(plain, IDS), plain_logprobs(trainer.model, IDS)
    torch.testing.assert_close(now, of_trainer, rtol=0, atol=2e-5)
    assert (now - plain_logprobs(load(tiny_folder), IDS)).abs().max() > 0.1


async def test_sampled_log_probs_after_a_publish_equal_the_trainers(
    make_engine: EngineMaker, tiny_folder: Path
) -> None:
    engine = make_engine()
    await engine.boot(TrainJob(**LORA, **QUICK))
    for number in range(3):
        await engine.step(Batch(number, random_calls(6, seed=number)), SPEC)
    await engine.publish(3)

    tokens = await collect(engine.generate([9, 10, 11], Sampling(max_tokens=20, ignore_eos=True)))

    ids = [9, 10, 11, *(token.id for token in tokens)]
    sampled_log_probs = torch.tensor([token.logprob for token in tokens])
    assert engine._trainer is not None
    of_trainer, of_start = (
        plain_logprobs(model, ids)[2:-1].gather(1, torch.tensor(ids[3:])[:, None])[:, 0]
        for model in (engine._trainer.model, load(tiny_folder))
    )
    assert (sampled_log_probs - of_trainer).abs().max() < 5e-5
    assert (sampled_log_probs - of_start).abs().max() > 0.1


def no_second_copy() -> Any:
    raise AssertionError("the starting weights are there, below the adapters")


def test_the_reference_is_the_same_model_without_its_adapters(tiny_folder: Path) -> None:
    trainer = PolicyTrainer(load(tiny_folder), no_second_copy)
    spec = LossSpec("vanilla", 0.2, 0.28, 3.0, kl_loss_coef=0.1)
    assert step(trainer, 0, spec, ppo_epochs=1)["kl"] == pytest.approx(0, abs=1e-6)
    assert step(trainer, 1, spec)["kl"] > 1e-3

    full, calls = new_trainer(tiny_folder), random_calls(6)
    full.boot(TrainJob())
    actual = finish_log_probs(trainer.log_probs(calls, "reference"))
    expected = finish_log_probs(full.log_probs(calls, "reference"))
    own = finish_log_probs(trainer.log_probs(calls, "trained"))
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert own[0] != pytest.approx(actual[0], abs=1e-2), "and the adapters are back"


def finish_log_probs(running: Any) -> list[list[float]]:
    return finish(running)  # pyright: ignore[reportReturnType]


def test_a_step_abandoned_in_the_reference_pass_leaves_the_adapters_enabled(
    tiny_folder: Path,
) -> None:
    trainer = trained(tiny_folder)
    before = plain_logprobs(trainer.model, IDS)
    trainer.boot(TrainJob(**LORA, micro_batch_tokens=1))
    running = trainer.step(Batch(1, random_calls(4)), LossSpec(kl_loss_coef=0.1))
    next(running)

    assert torch.equal(plain_logprobs(trainer.model, IDS), before), "in its pauses too"
    running.close()

    assert torch.equal(plain_logprobs(trainer.model, IDS), before)
    step(trainer, 3)


@pytest.mark.parametrize("boots_first", [True, False])
def test_a_restored_adapter_continues_bit_equal(
    tiny_folder: Path, tmp_path: Path, boots_first: bool
) -> None:
    straight = trained(tiny_folder, 3)
    first, second = trained(tiny_folder, 1), new_trainer(tiny_folder)
    checkpoint.save(tmp_path / "c", first, random.Random(0))

    if boots_first:
        second.boot(TrainJob(**LORA, **QUICK))
    checkpoint.restore(tmp_path / "c", second, random.Random(1))
    for number in (1, 2):
        step(second, number)

    assert torch.equal(weights(second), weights(straight))


def test_a_lora_checkpoint_holds_only_adapters_and_their_moments(
    tiny_folder: Path, tmp_path: Path
) -> None:
    trainer = trained(tiny_folder)
    checkpoint.save(tmp_path / "c", trainer, random.Random(0))

    kept = load_file(tmp_path / "c" / "weights.safetensors")
    moments = load_file(tmp_path / "c" / "optimizer.safetensors")
    assert len(kept) == 28 and all(".lora_" in name for name in kept)
    assert {name.rpartition(".")[0] for name in moments} == kept.keys()
    other = new_trainer(tiny_folder)
    checkpoint.restore(tmp_path / "c", other, random.Random(0))
    other.optimizer.state.clear()
    for one in (trainer, other):
        step(one, 2)
    assert not torch.equal(weights(trainer), weights(other))


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ({}, {"lora_rank": 4}),
        ({"lora_rank": 4}, {}),
        ({"lora_rank": 4}, {"lora_rank": 8}),
        ({"lora_rank": 4}, {"lora_rank": 4, "lora_alpha": 32}),
        ({"lora_rank": 4}, {"lora_rank": 4, "target_modules": "q_proj"}),
    ],
)
def test_a_run_cannot_change_its_lora_settings(
    tiny_folder: Path, tmp_path: Path, saved: dict[str, Any], wanted: dict[str, Any]
) -> None:
    first = new_trainer(tiny_folder)
    first.boot(TrainJob(**saved))
    checkpoint.save(tmp_path / "c", first, random.Random(0))
    second, third = new_trainer(tiny_folder), new_trainer(tiny_folder)
    second.boot(TrainJob(**wanted))
    before = weights(second)

    message = "keep to what the run began with, or choose another --run-dir"
    with pytest.raises(BackendError, match=message) as caught:
        checkpoint.restore(tmp_path / "c", second, random.Random(0))
    assert str(caught.value).startswith(f"checkpoint {tmp_path / 'c'} has lora_rank = ")
    assert ", and the job has lora_rank = " in str(caught.value)
    assert torch.equal(weights(second), before)

    checkpoint.restore(tmp_path / "c", third, random.Random(0))
    with pytest.raises(BackendError, match=f"the job has lora_rank = .*{message}"):
        third.boot(TrainJob(**wanted))
    third.boot(TrainJob(**saved))


def test_an_adapter_of_other_weights_of_the_same_shape_is_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "c", trained(tiny_folder), random.Random(0))
    checkpoint.export(tmp_path / "other", trained(tiny_folder).model, torch.float32, tiny_folder)
    with pytest.raises(BackendError, match="another model"):
        checkpoint.restore(tmp_path / "c", new_trainer(tmp_path / "other"), random.Random(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_contains_merged_adapters(
    demo_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """The demo model's LM head is tied to its embedding."""
    trainer = trained(demo_folder)
    checkpoint.export(tmp_path / "e", trainer.model, dtype, demo_folder)

    open_model_folder(tmp_path / "e")
    exported, merged = named_weights(load(tmp_path / "e")), MergedWeights(trainer.model)
    assert exported.keys() == set(merged)
    assert all(torch.equal(exported[name], merged[name].to(dtype).float()) for name in merged)
    assert not torch.equal(
        plain_logprobs(load(tmp_path / "e"), IDS), plain_logprobs(load(demo_folder), IDS)
    )


def test_sharing_prefixes_trains_the_same_adapters(tiny_folder: Path) -> None:
    moved: list[torch.Tensor] = []
    calls = [call for call in random_calls(3) for _ in range(3)]
    for forest in (True, False):
        trainer = new_trainer(tiny_folder)
        trainer.boot(TrainJob(**LORA))
        before = weights(trainer)
        for _ in range(5):
            job = LORA | QUICK | {"lr": 1e-3, "forest": forest}
            rho = train(trainer, calls, SPEC, **job)["rho"]
            assert rho > 2 if forest else rho == 1
        moved.append(weights(trainer) - before)
    assert moved[0].norm() > 0
    assert (moved[0] - moved[1]).norm() < 1e-2 * moved[0].norm()


@pytest.mark.parametrize("policy", ["trained", "reference"])
def test_exported_adapters_give_peft_the_trainers_log_probabilities(
    tiny_folder: Path, tmp_path: Path, policy: PolicyName
) -> None:
    trainer = trained(tiny_folder)
    checkpoint.export_adapters(tmp_path, trainer, policy)
    peft: Any = importlib.import_module("peft")
    model = peft.PeftModel.from_pretrained(load(tiny_folder), tmp_path)
    own = trainer.model if policy == "trained" else load(tiny_folder)
    ids = list(IDS)
    torch.testing.assert_close(
        plain_logprobs(model, ids), plain_logprobs(own, ids), atol=1e-5, rtol=0
    )


def test_a_trainer_without_adapters_exports_none(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendRefused, match="has no adapters to publish"):
        checkpoint.export_adapters(tmp_path / "new", new_trainer(tiny_folder), "trained")
    assert not (tmp_path / "new").exists()
