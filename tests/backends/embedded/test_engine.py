from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from backends.embedded.driving import (
    SPEC,
    EngineMaker,
    ask,
    call_of,
    collect,
    load,
    plain_logprobs,
    random_calls,
)
from backends.embedded.learning import success, train_on_sums

from fakevllm_adapters.errors import WireError
from fakevllm_adapters.train_job import TrainJob
from fakevllm_server.backends.base import BackendError, Batch, Call, LossSpec
from fakevllm_server.backends.embedded.draft import Draft
from fakevllm_server.backends.embedded.engine import EmbeddedEngine
from fakevllm_server.backends.sampling import Sampling

ENDLESS = Sampling(max_tokens=250, ignore_eos=True, live=True)


def exported(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


async def test_a_reply_ends_with_the_end_of_sequence(demo_engine: EmbeddedEngine) -> None:
    prompt = demo_engine.render(ask("What is 3 plus 4?"))

    tokens = await collect(demo_engine.generate(prompt, Sampling(temperature=0, max_tokens=50)))

    assert tokens[-1].id in demo_engine.eos_ids
    assert demo_engine.decode([token.id for token in tokens]).endswith("7.")
    assert "<|im_end|>" in demo_engine.decode([tokens[-1].id], skip_special_tokens=False)


async def test_greedy_tokens_are_those_of_transformers(
    demo_engine: EmbeddedEngine, demo_folder: Path
) -> None:
    prompt = demo_engine.render(ask("Say something about ducks, please. " * 3))
    model: Any = load(demo_folder)
    ids = torch.tensor([prompt])
    told = model.generate(ids, attention_mask=ids**0, max_new_tokens=24, do_sample=False)
    expected = told[0, len(prompt) :].tolist()

    tokens = await collect(demo_engine.generate(prompt, Sampling(temperature=0, max_tokens=24)))

    assert [token.id for token in tokens] == expected


async def test_logprobs_are_the_models_own_at_the_asked_temperature(
    demo_engine: EmbeddedEngine, demo_folder: Path
) -> None:
    prompt = demo_engine.render(ask("What is 1 plus 2?"))
    sampling = Sampling(temperature=1.7, max_tokens=30, top_logprobs=3, ignore_eos=True)

    tokens = await collect(demo_engine.generate(prompt, sampling))

    plain = plain_logprobs(load(demo_folder), prompt + [token.id for token in tokens], 1.7)
    for at, token in enumerate(tokens, start=len(prompt) - 1):
        assert token.logprob == pytest.approx(plain[at, token.id].item(), abs=2e-4)
        assert [value for _, value in token.top] == pytest.approx(
            plain[at].topk(3).values.tolist(), abs=2e-4
        )


async def test_the_same_seed_gives_the_same_reply_and_another_seed_another(
    demo_engine: EmbeddedEngine,
) -> None:
    prompt = demo_engine.render(ask("Tell me a number."))

    def reply(seed: int | None) -> Any:
        sampling = Sampling(temperature=1.5, max_tokens=40, seed=seed, ignore_eos=True)
        return collect(demo_engine.generate(prompt, sampling))

    alone = await reply(7)
    together = await asyncio.gather(*(reply(seed) for seed in (7, 8, None, None, 7)))

    ids = [[token.id for token in tokens] for tokens in together]
    assert ids[0] == ids[4] == [token.id for token in alone]
    assert len({tuple(row) for row in ids}) == 4


async def test_live_tokens_come_one_by_one_and_others_all_at_once(
    demo_engine: EmbeddedEngine,
) -> None:
    prompt = demo_engine.render(ask("Hi"))
    sizes: dict[bool, list[int]] = {}
    for live in (True, False):
        sampling = Sampling(max_tokens=6, ignore_eos=True, live=live)
        sizes[live] = [len(tokens) async for tokens in demo_engine.generate(prompt, sampling)]

    assert sizes == {True: [1] * 6, False: [6]}


async def test_more_requests_than_rows_all_get_their_reply(make_engine: EngineMaker) -> None:
    engine = make_engine(max_num_seqs=3)

    sampling = Sampling(max_tokens=5, ignore_eos=True)
    replies = await asyncio.gather(
        *(collect(engine.generate([9, index], sampling)) for index in range(20))
    )

    assert [len(reply) for reply in replies] == [5] * 20


def running_draft(engine: EmbeddedEngine) -> Draft:
    return engine._state.decoder.rows[0]  # pyright: ignore[reportPrivateUsage]


async def test_closing_a_reply_frees_its_row(make_engine: EngineMaker) -> None:
    engine = make_engine(max_num_seqs=1)
    reply = engine.generate([9, 10], ENDLESS)
    await anext(reply)
    closed = running_draft(engine)

    await reply.aclose()

    next_reply = await collect(engine.generate([9, 11], Sampling(max_tokens=2, ignore_eos=True)))
    assert len(next_reply) == 2
    assert closed.num_sampled < 250, "its row was not kept to the end"


async def test_a_cancelled_task_frees_its_row_too(make_engine: EngineMaker) -> None:
    engine = make_engine(max_num_seqs=1)
    started = asyncio.Event()

    async def reply() -> None:
        async for _ in engine.generate([9, 10], ENDLESS):
            started.set()

    task = asyncio.create_task(reply())
    await started.wait()
    cancelled = running_draft(engine)

    task.cancel()

    next_reply = await collect(engine.generate([9, 11], Sampling(max_tokens=2, ignore_eos=True)))
    assert len(next_reply) == 2
    assert cancelled.num_sampled < 250, "its row was not kept to the end"


async def test_no_reply_outgrows_the_model(make_engine: EngineMaker) -> None:
    engine = make_engine(max_model_len=20)

    sampling = Sampling(max_tokens=16, ignore_eos=True)
    reply = await collect(engine.generate(list(range(7, 23)), sampling))

    assert len(reply) == 4


@pytest.mark.parametrize("prompt", [[], [-1], [512], list(range(7, 27))])
async def test_prompts_that_cannot_be_continued_are_a_400(
    make_engine: EngineMaker, prompt: list[int]
) -> None:
    engine = make_engine(max_model_len=20)

    with pytest.raises(WireError) as caught:
        await collect(engine.generate(prompt, Sampling()))

    assert caught.value.status == 400


async def test_a_reply_gets_its_share_of_the_thread_while_a_step_trains(
    make_engine: EngineMaker,
) -> None:
    engine = make_engine()
    await engine.boot(TrainJob(micro_batch_tokens=1, max_mismatch_k3=None))
    reply = engine.generate([9, 10], ENDLESS)
    await anext(reply)
    draft = running_draft(engine)
    before = draft.num_sampled

    metrics = await engine.step(Batch(1, random_calls(20)), SPEC)

    assert metrics["skipped"] == 0
    assert draft.num_sampled - before > 30, "more than one token per micro-batch"
    await reply.aclose()


async def test_after_a_publish_the_trained_weights_sample(
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


async def test_a_publish_refuses_nobody_and_cuts_nobody_short(make_engine: EngineMaker) -> None:
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


async def test_an_engine_goes_on_from_a_checkpoint_as_if_nothing_had_happened(
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


async def test_training_trouble_is_the_callers_and_serving_goes_on(
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


async def test_a_closed_engine_fails_what_was_running(make_engine: EngineMaker) -> None:
    engine = make_engine()
    running = engine.generate([9, 10], ENDLESS)
    await anext(running)

    engine.close()

    with pytest.raises(WireError, match="503"):
        await collect(running)
    with pytest.raises(WireError, match="503"):
        await collect(engine.generate([9, 10], ENDLESS))


CRASH = """
import asyncio, sys
from pathlib import Path
from fakevllm_server.backends.base import Sampling
from fakevllm_server.backends.embedded.engine import EmbeddedEngine, EngineConfig

async def main():
    engine = EmbeddedEngine(EngineConfig(Path(sys.argv[1]), "tiny"))
    running = engine.generate([9, 10], Sampling(max_tokens=200, ignore_eos=True, live=True))
    await anext(running)
    engine._state.decoder.cache.keys = None
    try:
        async for _ in running: pass
    except Exception as error:
        print("request failed:", error, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_crash_fails_running_requests_and_ends_the_process(tiny_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(tiny_folder)],
        capture_output=True,
        text=True,
        timeout=50,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )

    assert done.returncode == 70
    assert "request failed: 500" in done.stdout
    assert "Traceback" in done.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", [{"lr": 4e-4}, {"lr": 1e-3, "lora_rank": 8}])
async def test_training_raises_the_reward(
    make_engine: EngineMaker, demo_folder: Path, settings: dict[str, Any]
) -> None:
    """Twenty-five steps of the demo's task; the README has the full curve."""
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
