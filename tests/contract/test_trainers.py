"""Contract tests of the trainers.

`trainers.FAKE_EXEMPTIONS` lists the features that the fake trainer does not have.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract.loss_cases import assert_same_updates, loss_settings
from contract.trainers import JOB, KINDS, Subject, kill, process_of, ray_workers, running
from swarm_server.backends.embedded.engine_helpers import with_token_advantages
from swarm_server.backends.verl.reference import (
    Reference,
    assert_transformers_load,
    have_same_weights,
    on_policy_calls,
    stale,
)

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.process.procfs import SESSION, live_processes
from fakevllm_server.types.backend import (
    ActionFailed,
    BackendError,
    Batch,
    Call,
    LossSpec,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

ONE_TOKEN = Call("g", [5, 6], [ord("y")], [math.log(0.3)], 0, 1.0, 1.0, 1.0)
GONE_WITHIN_S = 30


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Subject]:
    """A trainer's process for all tests of a kind, because some take half a minute to start."""
    async with running(request.param, tmp_path_factory.mktemp(request.param)) as subject:
        await subject.engine.save(subject.folder / "untouched")
        yield subject


@pytest_asyncio.fixture(loop_scope="module")
async def trainer(shared: Subject) -> Subject:
    """The trainer, restored to its initial state."""
    await shared.engine.restore(shared.folder / "untouched")
    await shared.engine.boot(JOB)
    return shared


async def test_a_step_changes_the_exported_weights(trainer: Subject) -> None:
    before = await trainer.export("before")
    metrics = await trainer.step([ONE_TOKEN])
    after = await trainer.export("after")

    assert metrics["tokens"] == 1
    assert not have_same_weights(before, after)


async def test_a_batch_without_calls_changes_nothing(trainer: Subject) -> None:
    before = await trainer.export("before_empty")
    metrics = await trainer.step([])
    after = await trainer.export("after_empty")

    assert metrics["tokens"] == 0
    assert metrics.get("grad_norm", 0) == 0
    assert have_same_weights(before, after)


async def test_a_restored_trainer_takes_the_same_next_step(trainer: Subject) -> None:
    """The second step depends on the optimizer's moments after the first step."""
    calls = on_policy_calls(mixed=True)
    await trainer.step(calls)
    await trainer.engine.save(trainer.folder / "saved")
    uninterrupted = await trainer.step(calls)
    expected = await trainer.export("uninterrupted")

    await trainer.step(stale(calls))
    await trainer.engine.restore(trainer.folder / "saved")
    await trainer.engine.boot(JOB)
    again = await trainer.step(calls)

    assert again | {"seconds": 0} == uninterrupted | {"seconds": 0}
    assert have_same_weights(await trainer.export("again"), expected)


@pytest.mark.parametrize(
    "sample",
    [
        pytest.param(on_policy_calls, id="alike"),
        pytest.param(partial(on_policy_calls, mixed=True), id="temperatures-and-weights"),
    ],
)
async def test_calls_sampled_by_the_model_itself_are_on_policy(
    trainer: Subject, sample: Callable[[], list[Call]]
) -> None:
    trainer.needs("arithmetic")
    metrics = await trainer.step(sample())

    assert abs(metrics["ppo_kl"]) < 1e-5 and abs(metrics["approx_kl"]) < 1e-5
    assert metrics["prob_diff_max"] < 1e-6
    assert metrics["clip_fraction"] == metrics["clip_fraction_lower"] == 0
    assert metrics["skipped"] == 0


@pytest.mark.parametrize(
    ("sample", "settings"),
    [
        pytest.param(on_policy_calls, {}, id="plain"),
        pytest.param(partial(on_policy_calls, mixed=True), {}, id="temperatures-and-weights"),
        pytest.param(
            lambda: stale(on_policy_calls(mixed=True)), {"ppo_epochs": 3}, id="stale-epochs"
        ),
        pytest.param(
            lambda: with_token_advantages(stale(on_policy_calls())),
            {"ppo_epochs": 2},
            id="token-advantages",
        ),
        pytest.param(partial(on_policy_calls, 9), {"micro_batch_tokens": 20}, id="small-pieces"),
        pytest.param(
            lambda: stale(on_policy_calls(mixed=True)),
            {"kl_loss_coef": 2.0, "ppo_epochs": 2},
            id="kl",
        ),
        pytest.param(
            lambda: stale(on_policy_calls(3)),
            {"grad_clip": 0.01, "weight_decay": 0.1, "clip_ratio_high": 0.05, "clip_ratio_c": 1.2},
            id="clipped-and-decayed",
        ),
    ],
)
async def test_all_trainers_make_the_same_step(
    trainer: Subject, sample: Callable[[], list[Call]], settings: dict[str, float]
) -> None:
    calls = sample()
    trainer.needs("arithmetic")
    job = TrainJob.model_validate(JOB.model_dump() | settings)
    reference = Reference(job)

    await trainer.engine.boot(job)
    for _ in range(2):
        metrics, expected = await trainer.step(calls, job), reference.step(calls)

        assert expected["grad_norm"] > 0
        for name in ("loss", "grad_norm", "approx_kl", "mismatch", "prob_diff_max", "entropy"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert metrics["tokens"] == expected["tokens"] and metrics["lr"] == job.lr
        assert ("kl" in metrics) == ("kl" in expected) == (job.kl_loss_coef > 0)
        if job.kl_loss_coef > 0:
            assert metrics["kl"] == pytest.approx(expected["kl"], rel=1e-3, abs=1e-6)
        for name in ("clip_fraction", "clip_fraction_lower", "ppo_kl"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name
    reference.assert_same_weights(await trainer.export("stepped"))


async def test_a_batch_of_tied_groups_moves_the_weights_only_by_earlier_gradients(
    trainer: Subject,
) -> None:
    """All advantages are 0. The optimizer makes its update all the same, so the moments of earlier
    steps move the weights."""
    trainer.needs("arithmetic")
    reference = Reference(JOB)
    calls = on_policy_calls(mixed=True)
    tied = [replace(call, advantage=0.0) for call in calls]
    before = await trainer.export("before_ties")
    metrics = await trainer.step(tied)
    assert (metrics["grad_norm"], metrics["loss"], metrics["skipped"]) == (0, 0, 0)
    assert have_same_weights(before, await trainer.export("after_ties"))

    await trainer.step(calls)
    before = await trainer.export("before_more_ties")
    metrics = await trainer.step(tied)
    after = await trainer.export("after_more_ties")
    assert metrics["grad_norm"] == 0 and not have_same_weights(before, after)
    for batch in (tied, calls, tied):
        reference.step(batch)
    reference.assert_same_weights(after)


CLIP_BOUNDS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}


@pytest.mark.parametrize(
    ("name", "bounds"),
    [("vanilla", CLIP_BOUNDS | {"clip_ratio_c": 1.2}), ("cispo", CLIP_BOUNDS), ("gpg", {})],
)
async def test_all_trainers_report_the_same_clip_fractions_for_the_same_batch(
    trainer: Subject, name: str, bounds: dict[str, float]
) -> None:
    """Calls of episodes with several calls have smaller weights. Calls of tied groups, whose
    advantage is 0, count in the denominators."""
    trainer.needs("arithmetic")
    job = TrainJob.model_validate(JOB.model_dump() | bounds | {"loss": name})
    tied = [replace(call, advantage=0.0) for call in on_policy_calls(3, seed=1)]
    calls = stale([*on_policy_calls(mixed=True), *tied])

    await trainer.engine.boot(job)
    metrics, expected = await trainer.step(calls, job), Reference(job).step(calls)

    for metric in ("clip_fraction", "clip_fraction_lower", "ppo_kl"):
        assert metrics[metric] == pytest.approx(expected[metric], rel=1e-3, abs=1e-6), metric
    assert (expected["clip_fraction"] > 0) == (name != "gpg")
    assert (expected["clip_fraction_lower"] > 0) == (name == "vanilla")


@pytest.mark.parametrize(
    "poison",
    [
        pytest.param({"logprobs": [math.nan]}, id="logprob-is-nan"),
        pytest.param({"advantage": 3e38, "weight": 1e6}, id="advantage-overflows"),
    ],
)
async def test_a_poisoned_call_does_not_change_the_weights(
    trainer: Subject, poison: dict[str, object]
) -> None:
    trainer.needs("poison")
    before = await trainer.export("before_poison")
    poisoned = replace(ONE_TOKEN, **poison)  # pyright: ignore[reportArgumentType]

    metrics = await trainer.step([*on_policy_calls(2), poisoned])

    assert metrics["skipped"] == metrics["no_update"] == 1
    values = [metrics[name] for name in ("loss", "grad_norm") if name in metrics]
    assert not all(map(math.isfinite, values)), "a metric must show the value that is not finite"
    assert have_same_weights(await trainer.export("after_poison"), before)
    reference = Reference(JOB)
    reference.step(on_policy_calls(2))
    await trainer.step(on_policy_calls(2))
    reference.assert_same_weights(await trainer.export("after_antidote"))


async def test_a_step_too_far_from_its_engine_makes_no_update_and_reports_it(
    trainer: Subject,
) -> None:
    trainer.needs("arithmetic")
    limited = JOB.model_copy(update={"max_mismatch_k3": 0.1})
    await trainer.engine.boot(limited)
    calls = on_policy_calls()
    far = [replace(call, logprobs=[value - 2 for value in call.logprobs]) for call in calls]
    before = await trainer.export("before_far")
    metrics = await trainer.step(far, limited)
    after = await trainer.export("after_far")

    assert metrics["too_far"] == metrics["skipped"] == 1
    assert metrics["mismatch_k3"] == pytest.approx(math.exp(2) - 2 - 1, rel=1e-3)
    assert have_same_weights(before, after)
    near = await trainer.step(calls, limited)
    assert near["skipped"] == 0 and near["ess"] == pytest.approx(1, abs=1e-5)


async def test_the_error_for_an_unknown_loss_names_the_loss(trainer: Subject) -> None:
    trainer.needs("settings")
    unknown = replace(LossSpec.of(JOB), name="no_such_loss")

    with pytest.raises(ActionFailed, match="no_such_loss"):
        await trainer.engine.step(Batch(1, [ONE_TOKEN]), unknown)

    assert (await trainer.step([ONE_TOKEN]))["skipped"] == 0


async def test_the_error_for_a_missing_checkpoint_names_the_folder(trainer: Subject) -> None:
    with pytest.raises(ActionFailed, match="nowhere"):
        await trainer.engine.restore(trainer.folder / "nowhere")

    assert await trainer.engine.health()


async def test_an_export_can_be_loaded_by_transformers(trainer: Subject) -> None:
    trainer.needs("a model")
    await trainer.step([ONE_TOKEN])

    assert_transformers_load(await trainer.export("model"))


async def test_health_is_answered_during_a_step(trainer: Subject) -> None:
    trainer.needs("weights of its own process")
    stepping = asyncio.ensure_future(trainer.step(on_policy_calls(150)))
    answers = 0
    while not stepping.done():
        assert await trainer.engine.health()
        answers += not stepping.done()
    await stepping

    assert answers > 0


async def test_a_trainer_without_a_rollout_engine_refuses_to_publish(trainer: Subject) -> None:
    trainer.needs("a model")
    with pytest.raises(ActionFailed, match="only trains"):
        await trainer.engine.publish(1)


async def test_the_reference_is_the_initial_weights_also_after_a_restore(
    trainer: Subject,
) -> None:
    trainer.needs("a model")
    job = JOB.model_copy(update={"kl_loss_coef": 0.1})
    await trainer.engine.boot(job)
    first = await trainer.step([ONE_TOKEN], job)
    assert first["kl"] == pytest.approx(0, abs=1e-7)
    await trainer.engine.save(trainer.folder / "held")
    second = await trainer.step([ONE_TOKEN], job)
    assert second["kl"] > 1e-6

    await trainer.engine.restore(trainer.folder / "held")
    await trainer.engine.boot(job)
    assert (await trainer.step([ONE_TOKEN], job))["kl"] == second["kl"]


async def test_log_probabilities_are_available_for_both_policies(trainer: Subject) -> None:
    calls = [ONE_TOKEN, *stale(on_policy_calls(3))]
    job = JOB.model_copy(update={"use_kl_in_reward": True})
    await trainer.engine.boot(job)
    before = await trainer.engine.log_probs(calls, "trained")
    assert [len(row) for row in before] == [len(call.response_ids) for call in calls]
    await trainer.step(calls)

    assert await trainer.engine.log_probs(calls, "reference") == before
    assert await trainer.engine.log_probs(calls, "trained") != before


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_ranks(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Subject]:
    folder = tmp_path_factory.mktemp("ranks")
    async with running("verl", folder, "--num-workers", "2") as subject:
        await subject.engine.save(subject.folder / "untouched")
        yield subject


@pytest_asyncio.fixture(loop_scope="module")
async def two_ranks(shared_ranks: Subject) -> Subject:
    """The trainer with two workers, restored to its initial state."""
    await shared_ranks.engine.restore(shared_ranks.folder / "untouched")
    await shared_ranks.engine.boot(JOB)
    return shared_ranks


@pytest.mark.real
@pytest.mark.parametrize("settings", loss_settings())
@pytest.mark.parametrize("shared", ["verl"], indirect=True)
async def test_one_and_two_ranks_train_every_loss_as_the_embedded_trainer_does(
    trainer: Subject, two_ranks: Subject, settings: dict[str, Any]
) -> None:
    await assert_same_updates(settings, trainer, two_ranks)


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(900)
async def test_four_ranks_train_every_loss_as_the_embedded_trainer_does(tmp_path: Path) -> None:
    async with running("verl", tmp_path, "--num-workers", "4") as subject:
        await subject.engine.save(subject.folder / "untouched")
        for parameters in loss_settings():
            (settings,) = parameters.values
            await assert_same_updates(settings, subject)


@pytest.mark.real
@pytest.mark.parametrize("shared", ["verl"], indirect=True)
async def test_two_verl_trainers_are_independent_and_two_ranks_make_the_step_of_one(
    trainer: Subject, two_ranks: Subject
) -> None:
    """Three rows on two ranks need one row of padding."""
    calls = on_policy_calls(3, mixed=True)
    job_with_kl = JOB.model_copy(update={"kl_loss_coef": 2.0})
    reference = Reference(job_with_kl)
    for _ in range(2):
        expected = reference.step(calls)
        steps = (subject.step(calls, job_with_kl) for subject in (trainer, two_ranks))
        for metrics in await asyncio.gather(*steps):
            for name in ("loss", "grad_norm", "entropy", "prob_diff_max", "kl"):
                assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    for subject in (trainer, two_ranks):
        reference.assert_same_weights(await subject.export("together"))
    assert_transformers_load(two_ranks.folder / "together")


@pytest.mark.real
@pytest.mark.parametrize("shared", ["verl"], indirect=True)
async def test_a_checkpoint_continues_with_another_number_of_workers(
    trainer: Subject, two_ranks: Subject
) -> None:
    calls = on_policy_calls(3, mixed=True)
    reference = Reference(JOB)
    reference.step(calls)
    await trainer.step(calls)
    for saver, other in ((trainer, two_ranks), (two_ranks, trainer)):
        checkpoint = saver.folder / "resharded"
        await saver.engine.save(checkpoint)
        await other.engine.restore(checkpoint)
        assert have_same_weights(await saver.export("saver"), await other.export("other"))
        expected = reference.step(calls)
        metrics = await other.step(calls)
        assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        reference.assert_same_weights(await other.export("continued"))


@pytest.mark.real
@pytest.mark.parametrize("shared", ["verl"], indirect=True)
async def test_verl_trains_shared_prefixes_as_the_embedded_trainer_does(
    trainer: Subject, two_ranks: Subject
) -> None:
    calls = on_policy_calls(7, mixed=True, shared_tokens=40)
    reference = Reference(JOB)
    expected = reference.step(calls)
    log_probs = await trainer.engine.log_probs(calls, "trained")
    metrics, of_two = await asyncio.gather(trainer.step(calls), two_ranks.step(calls))

    for name in ("loss", "grad_norm", "entropy", "prob_diff_max"):
        for measured in (metrics, of_two):
            assert measured[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
    assert expected["rho"] > 2
    for name in ("rho", "tokens_computed", "tokens_saved"):
        assert metrics[name] == expected[name], name
    # Both workers compute the shared tokens.
    assert of_two["tokens_computed"] == expected["tokens_computed"] + 40
    for call, values in zip(calls, log_probs, strict=True):
        assert values == pytest.approx(list(call.logprobs), abs=1e-4)
    reference.assert_same_weights(await trainer.export("shared"))

    without = JOB.model_copy(update={"forest": False})
    await trainer.engine.boot(without)
    assert (await trainer.step(calls, without))["rho"] == 1


@pytest.mark.real
async def test_a_killed_verl_trainer_leaves_no_process_behind(two_ranks: Subject) -> None:
    session = process_of(two_ranks)
    assert len(ray_workers(live_processes(SESSION, session))) == 2

    kill(session)
    deadline = time.monotonic() + GONE_WITHIN_S
    while live_processes(SESSION, session):
        assert time.monotonic() < deadline, live_processes(SESSION, session)
        await asyncio.sleep(0.1)

    assert "exited with code -9" in await two_ranks.engine.lost()


@pytest.mark.real
async def test_a_frozen_worker_of_a_verl_trainer_counts_as_lost_after_the_timeout(
    tmp_path: Path,
) -> None:
    async with running("verl", tmp_path, "--num-workers=2", "--collective-timeout=30") as trainer:
        worker = ray_workers(live_processes(SESSION, process_of(trainer)))[0]
        os.kill(worker, signal.SIGSTOP)
        with pytest.raises(BackendError, match="did not answer step"):
            await trainer.step([ONE_TOKEN])
        assert "exited with code 70" in await trainer.engine.lost()
        log = (tmp_path / "trainer.log").read_text()
        assert "the verl trainer ends: 1 of 2 workers have not answered for 30 s" in log


@pytest.mark.real
@pytest.mark.long
async def test_a_verl_trainer_whose_worker_is_killed_continues_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    calls = on_policy_calls(mixed=True)
    reference = Reference(JOB)
    for _ in range(2):
        reference.step(calls)
    async with running("verl", tmp_path) as trainer:
        await trainer.step(calls)
        await trainer.engine.save(tmp_path / "saved")
        session = process_of(trainer)
        kill(ray_workers(live_processes(SESSION, session))[0])

        with pytest.raises(BackendError, match="did not answer step") as failed:
            await trainer.step(calls)
        assert not isinstance(failed.value, ActionFailed)
        assert "exited with code 70" in await trainer.engine.lost()
        last_line = (tmp_path / "trainer.log").read_text().strip().splitlines()[-1]
        assert last_line.startswith("the verl trainer ends: a Ray worker")

        await trainer.engine.launch()
        await trainer.engine.restore(tmp_path / "saved")
        await trainer.engine.boot(JOB)
        await trainer.step(calls)
        reference.assert_same_weights(await trainer.export("x"))
