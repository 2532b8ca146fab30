"""Training with a forest: pieces, sharing, and models that cannot share."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    CUT_DEPENDENT_METRICS,
    SPEC,
    call_of,
    decode_request,
    finish,
    load,
    pieces,
    plain_logprobs,
    random_calls,
    run_dry,
    sampling_state,
    train,
    weights,
)
from transformers import AutoTokenizer

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.decode.request import DecodeRequest
from fakevllm_server.backends.embedded.demo_model.sums import Sum, prompt_text, random_sum
from fakevllm_server.backends.embedded.train.trainer import PolicyTrainer
from fakevllm_server.types.backend import Batch, Call, LossSpec, StepMetrics
from fakevllm_server.types.sampling import Sampling


def test_every_piece_fits_and_every_token_is_in_one_piece() -> None:
    calls = random_calls(40)
    step = pieces(calls, 60)
    sampled = [value for one in step.pieces for value in one.tokens.sampled_log_prob.tolist()]
    expected = torch.tensor([value for call in calls for value in call.logprobs])
    assert sorted(sampled) == sorted(expected.tolist())
    assert all(
        one.plan.forest.num_nodes <= 60 or len(one.plan.num_trained) == 1 for one in step.pieces
    )


def test_tokens_are_in_the_order_of_their_log_probabilities() -> None:
    call = Call("g", [11, 12, 13], [21, 22], [-0.5, -0.25], 0, 1.0, 2.0, 0.5)
    shorter_prompt = Call("g", [31], [41, 42, 43], [-1.0, -2.0, -3.0], 0, 1.0, -1.0, 1.0)

    (piece,) = pieces([call, shorter_prompt], 1000).pieces

    chosen = piece.plan.edge_token[piece.plan.gather]
    assert chosen.tolist() == [21, 22, 41, 42, 43]
    assert piece.tokens.sampled_log_prob.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0]
    assert piece.tokens.scale.tolist() == [0.125, 0.125, 0.25, 0.25, 0.25]


def siblings(folder: Path) -> list[Call]:
    """Return two groups of sampled siblings. The siblings of one group also have a next turn of the
    conversation."""
    state = sampling_state(load(folder))
    sampling = Sampling(temperature=1.0, ignore_eos=True)
    requests = [
        decode_request(range(7 + group, 40), 6, sampling, seed=i)
        for group in (0, 9)
        for i in range(4)
    ]
    for one in requests:
        state.scheduler.add(one)
    run_dry(state)
    calls = [
        call_of(one.ids[:-6], one.undelivered, sampling, (-1.0) ** i)
        for i, one in enumerate(requests)
    ]
    turns = [
        Call(
            "g",
            [*call.prompt_ids, *call.response_ids, 5, 6],
            [8, 9],
            [-3.0, -4.0],
            0,
            1.0,
            1.0,
            0.5,
        )
        for call in calls[:4]
    ]
    return [*calls, *turns]


def sums(model: Any, folder: Path, drawn: random.Random) -> list[Call]:
    """Sample eight answers to each of four of the demo's questions, with the demo's rewards."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    sampling = Sampling(temperature=1.0)
    state = sampling_state(model)
    attempts: list[tuple[Sum, int, DecodeRequest]] = []
    for one in [random_sum(drawn) for _ in range(4)]:
        prompt = tokenizer.encode(prompt_text(one.question), add_special_tokens=False)
        for _ in range(8):
            answer = decode_request(prompt, 24, sampling, seed=drawn.randrange(1 << 32))
            attempts.append((one, len(prompt), answer))
            state.scheduler.add(answer)
    run_dry(state)
    return [
        call_of(
            answer.ids[:num_prompt],
            answer.undelivered,
            sampling,
            1.0 if one.is_solved_by(_said(tokenizer, answer.ids[num_prompt:])) else -1.0,
        )
        for one, num_prompt, answer in attempts
    ]


def _said(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.parametrize("spec", [SPEC, LossSpec("gspo", 3e-4, 4e-4, kl_loss_coef=0.1)])
def test_ten_demo_steps_train_the_same_weights_with_and_without_the_forest(
    demo_folder: Path, spec: LossSpec
) -> None:
    """Both trainers train on new answers in every step, sampled by the weights of the first
    trainer."""
    shared, plain = (PolicyTrainer(load(demo_folder), lambda: load(demo_folder)) for _ in range(2))
    for trainer, forest in ((shared, True), (plain, False)):
        trainer.boot(TrainJob(forest=forest, lr=2.5e-4, micro_batch_tokens=600))
    before, drawn = weights(shared), random.Random(0)
    for step in range(10):
        batch = Batch(step, sums(shared.model, demo_folder, drawn), step)
        rho = [finish(one.step(batch, spec))["rho"] for one in (shared, plain)]
        assert rho[0] > 1 and rho[1] == 1
        # float32 sums in another order, which Adam enlarges where gradients are next to nothing:
        # 7e-5 after the first step, 2e-5 after the tenth. One end token left out comes to 2e-3.
        moved = weights(shared) - before
        assert ((weights(plain) - before) - moved).norm() < 3e-4 * moved.norm()


@pytest.mark.parametrize("spec", [SPEC, LossSpec("gspo", 3e-4, 4e-4, kl_loss_coef=0.1)])
def test_sharing_prefixes_trains_the_same_weights(tiny_folder: Path, spec: LossSpec) -> None:
    moved: list[torch.Tensor] = []
    for forest in (True, False):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        before = weights(trainer)
        for _ in range(10):
            rho = train(trainer, siblings(tiny_folder), spec, forest=forest, lr=1e-3)["rho"]
            assert rho > 2 if forest else rho == 1
        moved.append(weights(trainer) - before)
    assert moved[0].norm() > 0
    assert (moved[0] - moved[1]).norm() < 1e-4 * moved[0].norm()


@pytest.mark.parametrize(
    "spec",
    [
        LossSpec("gspo", 3e-4, 4e-4, entropy_coeff=0.01, kl_loss_coef=0.1, bypass_mode=False),
        LossSpec("gpg", rollout_is="token", rollout_is_batch_normalize=True, kl_loss_coef=0.1),
        LossSpec(
            bypass_mode=False,
            rollout_is="sequence",
            rollout_is_batch_normalize=True,
            kl_loss_coef=0.1,
        ),
    ],
)
def test_a_coupled_loss_in_several_pieces_trains_as_in_one(
    tiny_folder: Path, spec: LossSpec
) -> None:
    """gspo has one ratio per episode, and normalized weights have one mean per step, whatever the
    pieces."""
    calls = [replace(call, unit=f"episode {i % 4}") for i, call in enumerate(siblings(tiny_folder))]
    calls = [
        replace(call, logprobs=[value - 0.3 * (i % 3) for value in call.logprobs])
        for i, call in enumerate(calls)
    ]
    assert pieces(calls, 60, spec).whole is not None and pieces(calls, 10_000, spec).whole is None
    results: list[StepMetrics] = []
    for micro_batch_tokens in (60, 10_000):
        trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
        results.append(
            train(trainer, calls, spec, micro_batch_tokens=micro_batch_tokens, ppo_epochs=2)
        )
    for name in results[0].keys() - CUT_DEPENDENT_METRICS:
        values = [metrics[name] for metrics in results]
        assert values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-5), name
    assert results[0]["grad_norm"] > 0 and results[0]["kl"] != 0


def test_a_model_that_cannot_share_prefixes_trains_without_sharing_and_logs_it(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
    trainer.model.config.rope_parameters["rope_type"] = "dynamic"
    for _ in range(2):
        metrics = train(trainer, siblings(tiny_folder))
        assert metrics["rho"] == 1.0 and metrics["grad_norm"] > 0
    (message,) = caplog.messages
    assert "dynamic" in message


def test_a_step_whose_second_update_is_skipped_reports_the_first(
    trainer: PolicyTrainer, tiny_folder: Path
) -> None:
    """At this rate the second epoch's ratios overflow."""
    calls = siblings(tiny_folder)
    before = weights(trainer)
    metrics = train(trainer, calls, LossSpec("cispo", 10.0, 0.2), lr=1e30, ppo_epochs=2)
    assert metrics["skipped"] == 1 and "no_update" not in metrics
    assert not math.isfinite(metrics["loss"] + metrics["grad_norm"])
    assert not torch.equal(weights(trainer), before)


@pytest.mark.parametrize("forest", [True, False])
def test_log_probabilities_are_those_of_each_call_alone(tiny_folder: Path, forest: bool) -> None:
    """The test covers the trained and the starting weights; the rows are in the order of the
    calls."""
    calls = [*siblings(tiny_folder), *random_calls(7)]
    start = load(tiny_folder)
    trainer = PolicyTrainer(load(tiny_folder), lambda: load(tiny_folder))
    train(trainer, calls, lr=1e-2, forest=forest, micro_batch_tokens=60)

    rows_by_policy = {
        policy: finish(trainer.log_probs(calls, policy)) for policy in ("trained", "reference")
    }

    for policy, model in (("trained", trainer.model), ("reference", start)):
        for call, row in zip(calls, rows_by_policy[policy], strict=True):
            ids = [*call.prompt_ids, *call.response_ids]
            plain = plain_logprobs(model, ids, call.temperature)[len(call.prompt_ids) - 1 :]
            expected = [plain[at, token].item() for at, token in enumerate(call.response_ids)]
            assert row == pytest.approx(expected, abs=1e-4)
    now, before = (list(chain.from_iterable(rows)) for rows in rows_by_policy.values())
    assert max(abs(a - b) for a, b in zip(now, before, strict=True)) > 0.1
    assert finish(trainer.log_probs([], "reference")) == []
