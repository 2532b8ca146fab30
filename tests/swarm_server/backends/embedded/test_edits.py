"""Users' edits make the edited text more likely, also in a step that has nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from swarm_server.backends.embedded.engine_helpers import finish, plain_logprobs
from swarm_server.backends.embedded.test_feedback_sample import recorded
from swarm_server.backends.embedded.train.test_trainer import sampled_calls

from fakevllm_adapters.job.loss_spec import LossSpec
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import pack_ids
from fakevllm_adapters.protocol.swarm import AddDemonstrationRequest, DemonstrationIds
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.training.step_plan import plan_step
from fakevllm_server.types.calls import FinishedGroup, ScoredEpisode
from fakevllm_server.types.edit_demonstrations import edit_episodes, parse_demonstrations

PROMPT, EDIT, SERVED = [9, 10, 11], [20, 21, 2], [30, 31, 2]


def group_of_edit(*kinds: str) -> FinishedGroup:
    responses = {"plain": EDIT, "chosen": EDIT, "rejected": SERVED}
    ids = [
        DemonstrationIds.model_validate(
            {
                "kind": kind,
                "prompt_ids": pack_ids(PROMPT),
                "response_ids": pack_ids(responses[kind]),
            }
        )
        for kind in kinds
    ]
    request = AddDemonstrationRequest(sample_id="edit:g/f", run_id="", demonstrations=ids)
    loss, calls = parse_demonstrations(request)
    return FinishedGroup("edit:g/f", edit_episodes("edit:g/f", calls), demonstrates=loss)


def logprob(trainer: PolicyTrainer, response: list[int]) -> float:
    plain = plain_logprobs(trainer.model, [*PROMPT, *response])
    start = len(PROMPT) - 1
    return sum(plain[start + at, token].item() for at, token in enumerate(response))


@pytest.mark.parametrize("has_group", [False, True])
@pytest.mark.parametrize("is_alone", [False, True])
@pytest.mark.parametrize("kinds", [("plain",), ("chosen", "rejected")])
def test_a_step_makes_the_edit_likelier_than_the_served_answer(
    trainer: PolicyTrainer,
    tiny_folder: Path,
    kinds: tuple[str, ...],
    is_alone: bool,
    has_group: bool,
) -> None:
    loss = "dpo" if len(kinds) > 1 else "sft"
    beside = {"demonstration_loss": loss, "max_mismatch_k3": None}
    job = TrainJob.model_validate({"lr": 1e-3} | ({"loss": loss} if is_alone else beside))
    one, other = sampled_calls(tiny_folder, 1.0)[:2]
    episodes = [ScoredEpisode(0, 1.0, [recorded(one)]), ScoredEpisode(1, 0.0, [recorded(other)])]
    groups = [FinishedGroup("g", episodes)] if has_group else []
    trainer.boot(job)
    before = [logprob(trainer, EDIT), logprob(trainer, SERVED)]
    batch = plan_step(1, [*groups, group_of_edit(*kinds)], job).batch
    metrics = finish(trainer.step(batch, LossSpec.of(job)))
    after = [logprob(trainer, EDIT), logprob(trainer, SERVED)]
    assert after[0] > before[0] and after[0] - before[0] > after[1] - before[1]
    assert metrics["demonstrations"] >= len(kinds)
    assert all(map(math.isfinite, metrics.values()))
