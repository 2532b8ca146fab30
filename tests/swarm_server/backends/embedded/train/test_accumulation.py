"""Gradients of a step's pieces add up to those of the whole, and groups stay together."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import finish, load, pieces, random_calls
from torch import Tensor

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.forest import CallTokens, build_forest
from fakevllm_server.types.backend import Batch, Call, LossSpec

SYSTEM = [5, 6, 7]


def groups(count: int = 6, siblings: int = 4) -> list[Call]:
    """Return groups of siblings with a common system prompt, interleaved in the list."""
    prompts = random_calls(count, seed=1)
    answers = random_calls(count * siblings, seed=2)
    return [
        replace(
            answer,
            group_id=prompts[index % count].group_id,
            prompt_ids=[*SYSTEM, 20 + index % count, *prompts[index % count].prompt_ids],
        )
        for index, answer in enumerate(answers)
    ]


def size_of(calls: list[Call]) -> int:
    return build_forest(
        [CallTokens.of(one.prompt_ids, one.response_ids) for one in calls]
    ).num_nodes


@pytest.mark.parametrize("room", [0, 1, 40, 150])
@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_a_group_that_fits_is_in_one_piece(room: int, loss: str) -> None:
    calls = groups()
    if loss == "gspo":
        calls = [replace(one, unit=one.group_id) for one in calls]
    names = {one.group_id for one in calls}
    largest = max(size_of([one for one in calls if one.group_id == name]) for name in names)
    spec = LossSpec(loss, 0.2, 0.28)

    step = pieces(calls, largest + room, spec)

    homes = Counter(
        group for piece in step.pieces for group in {calls[at].group_id for at in piece.calls}
    )
    assert homes == dict.fromkeys(names, 1) and len(step.pieces) > 1
    assert all(piece.plan.forest.num_nodes <= largest + room for piece in step.pieces)
    assert step.whole is None, "one pass is enough"


@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_a_group_of_two_prompts_is_not_cut_if_another_cut_costs_the_same(loss: str) -> None:
    """The group's prompts share nothing, so only the group id keeps them together."""
    calls = [
        Call(group, [10 * at, 10 * at + 1], [10 * at + 2], [-1.0], 0, 1.0, 1.0, 1.0, unit=group)
        for at, group in enumerate("abbc", start=1)
    ]
    step = pieces(calls, 6, LossSpec(loss, 0.2, 0.28))
    assert len(step.pieces) > 1 and step.whole is None
    assert any({calls[at].group_id for at in piece.calls} == {"b"} for piece in step.pieces)


@pytest.mark.parametrize("lora", [{}, {"lora_rank": 4}])
@pytest.mark.parametrize("loss", ["vanilla", "gspo"])
def test_the_accumulated_gradient_is_that_of_the_whole_and_makes_one_update(
    tiny_folder: Path, loss: str, lora: dict[str, Any]
) -> None:
    spec = LossSpec(loss, 0.2, 0.28, kl_loss_coef=0.1, entropy_coeff=0.01)
    all_updates: list[Tensor] = []
    for micro_batch_tokens in (100_000, 150, 40, 1):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        job: dict[str, Any] = {"max_mismatch_k3": None, "grad_clip": 1e9, **lora}
        trainer.boot(TrainJob(micro_batch_tokens=micro_batch_tokens, **job))
        updates: list[Tensor] = []

        def look(optimizer: Any, *_: object, updates: list[Tensor] = updates) -> None:
            trained = optimizer.param_groups[0]["params"]
            updates.append(torch.cat([one.grad.flatten() for one in trained]))

        trainer.optimizer.register_step_pre_hook(look)
        finish(trainer.step(Batch(1, groups()), spec))
        all_updates += updates
    assert len(all_updates) == 4 and all_updates[0].norm() > 0
    for other in all_updates[1:]:
        assert (other - all_updates[0]).norm() < 1e-5 * all_updates[0].norm()
