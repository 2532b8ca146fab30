"""Replies of the engine, cancellation and crashes."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    ENDLESS,
    EngineMaker,
    ask,
    collect,
    load,
    plain_logprobs,
    running_request,
)

from fakevllm_adapters.protocol.errors import WireError
from fakevllm_server.backends.embedded import engine as engine_module
from fakevllm_server.backends.embedded.engine import EmbeddedEngine
from fakevllm_server.types.backend import BackendError
from fakevllm_server.types.sampling import Sampling, Token


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
    generated = model.generate(ids, attention_mask=ids**0, max_new_tokens=24, do_sample=False)
    expected = generated[0, len(prompt) :].tolist()

    tokens = await collect(demo_engine.generate(prompt, Sampling(temperature=0, max_tokens=24)))

    assert [token.id for token in tokens] == expected


async def test_logprobs_equal_the_models_own_at_the_requested_temperature(
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


async def test_live_tokens_arrive_one_by_one_and_others_all_at_once(
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


async def test_in_lockstep_a_reply_has_the_same_bits_alone_and_beside_others(
    demo_folder: Path, make_engine: EngineMaker
) -> None:
    engine = make_engine(demo_folder, lockstep=True)
    prompts = [engine.render(ask(f"What is {a} plus 4?" + " Please!" * a)) for a in range(6)]

    def reply(index: int) -> Coroutine[None, None, list[Token]]:
        sampling = Sampling(max_tokens=24, seed=index, ignore_eos=True)
        return collect(engine.generate(prompts[index], sampling))

    alone = [await reply(index) for index in range(6)]
    crowded = await asyncio.gather(*map(reply, reversed(range(6))))

    assert alone == list(reversed(crowded))


def test_lockstep_is_refused_on_devices_with_nondeterministic_sums(
    make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "resolve_device", lambda name: torch.device("cuda"))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]
    with pytest.raises(BackendError, match=r"lockstep is for the CPU.*--engine-arg=--device=cpu"):
        make_engine(lockstep=True)


async def test_closing_a_reply_frees_its_row(make_engine: EngineMaker) -> None:
    engine = make_engine(max_num_seqs=1)
    reply = engine.generate([9, 10], ENDLESS)
    await anext(reply)
    closed = running_request(engine)

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
    cancelled = running_request(engine)

    task.cancel()

    next_reply = await collect(engine.generate([9, 11], Sampling(max_tokens=2, ignore_eos=True)))
    assert len(next_reply) == 2
    assert cancelled.num_sampled < 250, "its row was not kept to the end"


async def test_a_reply_never_exceeds_the_models_length(make_engine: EngineMaker) -> None:
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


async def test_a_policy_is_loaded_without_the_tokenizer_of_its_folder(
    make_engine: EngineMaker, tiny_folder: Path, tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, tmp_path / name)
    engine = make_engine()
    await engine.load_policy("policy-3", tmp_path, 3)
    policy = engine.policy("policy-3")
    assert policy is not None
    prompt, sampling = policy.render(ask("Hello")), Sampling(temperature=0, max_tokens=5)
    tokens = await collect(policy.generate(prompt, sampling))
    expected = await collect(engine.generate(prompt, sampling))
    assert [token.id for token in tokens] == [token.id for token in expected]


async def test_a_closed_engine_fails_running_requests(make_engine: EngineMaker) -> None:
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
from fakevllm_server.types.backend import Sampling
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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 80),
        ({"lockstep": True}, 0),
        ({"prefix_cache_mib": 0}, 0),
        ({"prefix_cache_mib": 1}, 80),
    ],
)
async def test_a_later_turn_reuses_its_prompt_but_not_in_lockstep_or_without_a_cache(
    make_engine: EngineMaker, settings: dict[str, Any], expected: int
) -> None:
    engine = make_engine(**settings)
    first = [7 + number % 500 for number in range(80)]
    short = Sampling(max_tokens=2, ignore_eos=True)

    for prompt in (first, [*first, *range(20)]):
        tokens = await collect(engine.generate(prompt, short))
        assert len(tokens) == 2

    assert engine._state.prefixes.num_reused_tokens == expected  # pyright: ignore[reportPrivateUsage]


async def test_automatic_threads_are_one_in_lockstep(
    make_engine: EngineMaker, capfd: pytest.CaptureFixture[str]
) -> None:
    make_engine(torch_threads=None, lockstep=True)

    assert "and 1 torch threads\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, "the fused forward pass, in torch.float32"), ({"dtype": "bfloat16"}, "own forward pass")],
)
def test_the_engine_says_at_start_up_how_it_decodes(
    make_engine: EngineMaker,
    capfd: pytest.CaptureFixture[str],
    settings: dict[str, Any],
    expected: str,
) -> None:
    make_engine(**settings)

    (line,) = [line for line in capfd.readouterr().err.splitlines() if "decoding by" in line]
    assert expected in line and "attention fakevllm_grouped_sdpa" in line


async def test_in_lockstep_answers_before_a_prompt_do_not_change_its_bits(
    make_engine: EngineMaker,
) -> None:
    async def answer(engine: Any, prompt: list[int]) -> list[Token]:
        return await collect(
            engine.generate(prompt, Sampling(max_tokens=40, seed=1, ignore_eos=True))
        )

    prompt = [7 + number % 500 for number in range(80)]
    one, other = make_engine(lockstep=True), make_engine(lockstep=True)
    whole = [*prompt, *(token.id for token in await answer(one, prompt))]

    assert await answer(one, whole) == await answer(other, whole)
    assert await answer(one, whole[:-1]) == await answer(other, whole[:-1])
