"""Training while serving: steps, publishes, checkpoints and failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from swarm_server.backends.embedded.engine_helpers import (
    ENDLESS,
    SPEC,
    EngineMaker,
    call_of,
    collect,
    load,
    plain_logprobs,
    random_calls,
    running_request,
)
from swarm_server.backends.embedded.learning_curve import success, train_on_sums

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.types.backend import BackendError, Batch, Call, LossSpec
from fakevllm_server.types.sampling import Sampling


def exported(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


async def test_a_reply_is_decoded_while_a_step_trains(
    make_engine: EngineMaker,
) -> None:
    engine = make_engine()
    await engine.boot(TrainJob(micro_batch_tokens=1, max_mismatch_k3=None))
    reply = engine.generate([9, 10], ENDLESS)
    await anext(reply)
    request = running_request(engine)
    before = request.num_sampled

    metrics = await engine.step(Batch(1, random_calls(20)), SPEC)

    assert metrics["skipped"] == 0
    assert request.num_sampled - before > 30, "more than one token per micro-batch"
    await reply.aclose()


async def test_trained_weights_sample_after_a_publish(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    engine = make_engine()
    sampling = Sampling(max_tokens=10, ignore_eos=True)
    before = await collect(engine.generate([9, 10, 11], sampling))
    await engine.boot(TrainJob(lr=1e-2))
    await engine.step(Batch(1, [call_of([9, 10, 11], before, sampling, 1.0)]), SPEC)
    unpublished = await collect(engine.generate([9, 10, 11], sampling))
    await engine.publish(3)
    after = await collect(engine.generate([9, 10, 11], sampling))
    await engine.export(tmp_path / "e")

    assert {token.version for token in unpublished} == {0}
    assert {token.version for token in after} == {3}
    plain = plain_logprobs(load(tmp_path / "e"), [9, 10, 11, *(token.id for token in after)])
    for at, token in enumerate(after, start=2):
        assert token.logprob == pytest.approx(plain[at, token.id].item(), abs=2e-4)


async def test_a_publish_refuses_and_truncates_no_request(make_engine: EngineMaker) -> None:
    engine = make_engine(max_num_seqs=4, drain_bound_s=0.0)
    await engine.boot(TrainJob())
    replies = [asyncio.create_task(collect(engine.generate([9, i], ENDLESS))) for i in range(8)]
    for version in range(1, 5):
        await engine.publish(version)

    for reply in await asyncio.gather(*replies):
        versions = [token.version for token in reply]
        assert len(reply) == 250
        assert versions == sorted(versions)


async def test_loaded_weights_sample_under_their_version(
    make_engine: EngineMaker, tiny_folder: Path, demo_folder: Path, tmp_path: Path
) -> None:
    engine, other = make_engine(), make_engine()
    await other.boot(TrainJob(lr=1e-2))
    await other.step(Batch(1, random_calls(4)), SPEC)
    await other.export(tmp_path / "e")

    await engine.load_weights(tmp_path / "e", 5)

    greedy = Sampling(temperature=0, max_tokens=5, ignore_eos=True)
    tokens = await collect(engine.generate([9, 10], greedy))
    plain = plain_logprobs(load(tmp_path / "e"), [9, 10, *(token.id for token in tokens)])
    assert [token.id for token in tokens] == plain[1:-1].argmax(-1).tolist()
    assert {token.version for token in tokens} == {5}
    with pytest.raises(BackendError, match="another architecture"):
        await engine.load_weights(demo_folder, 6)


async def test_an_engine_restored_from_a_checkpoint_continues_bit_equal(
    make_engine: EngineMaker, tmp_path: Path
) -> None:
    job = TrainJob(lr=1e-3, ppo_epochs=2)
    straight, first, second = make_engine(), make_engine(), make_engine()
    for engine in (straight, first, second):
        await engine.boot(job)
    for number in range(3):
        await straight.step(Batch(number, random_calls(6, seed=number)), SPEC)
    await first.step(Batch(0, random_calls(6, seed=0)), SPEC)
    await first.save(tmp_path / "c")
    await second.restore(tmp_path / "c")
    for number in (1, 2):
        await second.step(Batch(number, random_calls(6, seed=number)), SPEC)

    for name, engine in (("a", straight), ("b", second)):
        await engine.export(tmp_path / name)
    assert exported(tmp_path / "a") == exported(tmp_path / "b")


async def test_a_training_failure_is_raised_to_the_caller_and_serving_continues(
    make_engine: EngineMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = make_engine()
    await engine.boot(TrainJob())
    greedy = Call("g", [1], [2], [-1.0], 0, temperature=0.0, advantage=1.0, weight=1.0)

    with pytest.raises(BackendError, match="greedy calls"):
        await engine.step(Batch(1, [greedy]), SPEC)
    with pytest.raises(BackendError, match="cannot read checkpoint"):
        await engine.restore(Path("/no/such/checkpoint"))

    assert len(await collect(engine.generate([9], Sampling(max_tokens=2, ignore_eos=True)))) == 2
    assert "Traceback" in capfd.readouterr().err, "the log has the details"


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"lr": 4e-4}, {"lr": 1e-3, "lora_rank": 8}])
async def test_training_raises_the_reward(
    make_engine: EngineMaker, demo_folder: Path, settings: dict[str, Any]
) -> None:
    """The test runs 25 steps of the demo's task; the README has the full curve."""
    engine = make_engine(demo_folder, seed=0)
    before = await success(engine, 300)
    job = TrainJob(ppo_epochs=2, **settings)

    await train_on_sums(engine, job, num_steps=25, num_siblings=8)

    assert await success(engine, 300) > before + 0.15


async def test_an_empty_batch_trains_nothing(make_engine: EngineMaker, tmp_path: Path) -> None:
    engine = make_engine()
    await engine.boot(TrainJob(lr=1e-2))
    await engine.export(tmp_path / "a")

    await engine.step(Batch(1, []), LossSpec.of(TrainJob()))

    await engine.export(tmp_path / "b")
    assert exported(tmp_path / "a") == exported(tmp_path / "b")
