"""The known prompt shows whether the sampler has the trainer's weights, and disturbs nobody."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.engine_helpers import (
    ENDLESS,
    SPEC,
    EngineMaker,
    collect,
    random_calls,
)
from swarm_server.backends.embedded.tiny_llama import SIZES
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.embedded.engine import EmbeddedEngine
from fakevllm_server.training.weight_probe import ProbeResult, compare
from fakevllm_server.types.backend import Batch, Call
from fakevllm_server.types.known_prompt import MAX_TOKENS
from fakevllm_server.types.sampling import Sampling

MODELS: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config),
    "llama": (LlamaForCausalLM, LlamaConfig),
    "mistral": (MistralForCausalLM, MistralConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
LORA: dict[str, Any] = {"lora_rank": 4}


async def probed(engine: EmbeddedEngine) -> ProbeResult:
    """Compare the sampler's log-probabilities with the trainer's, as the server does."""
    reply = await engine.probe()
    ids = reply.ids
    call = Call("probe", ids[:1], ids[1:], [0.0] * (len(ids) - 1), 0, 1.0, 0.0, 1.0)
    (expected,) = await engine.log_probs([call], "trained")
    result = compare(reply, expected)
    assert result is not None and 1 < len(ids) <= MAX_TOKENS
    return result


def layer_of(engine: EmbeddedEngine) -> Any:
    """Return the first layer of the sampler's model."""
    model: Any = engine._state.model  # pyright: ignore[reportPrivateUsage]
    return model.model.layers[0]


@pytest.fixture(scope="module", params=["demo", *MODELS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "demo":
        return DEMO_MODEL_DIR
    folder = tmp_path_factory.mktemp("models") / request.param
    shutil.copytree(DEMO_MODEL_DIR, folder)
    network, config = MODELS[request.param]
    torch.manual_seed(0)
    network(config(**SIZES)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_equal_weights_pass_for_every_model_before_and_after_a_step(
    make_engine: EngineMaker, folder: Path, dtype: str
) -> None:
    engine = make_engine(folder, dtype=dtype)
    await engine.boot(TrainJob(lr=1e-3, max_mismatch_k3=None))
    for version in range(3):
        await engine.publish(version)
        result = await probed(engine)
        assert result.difference < result.limit / 3, "there is room for larger models"
        await engine.step(Batch(version + 1, random_calls(4)), SPEC)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_equal_weights_pass_with_adapters(make_engine: EngineMaker, dtype: str) -> None:
    engine = make_engine(DEMO_MODEL_DIR, dtype=dtype)
    await engine.boot(TrainJob(lr=1e-2, max_mismatch_k3=None, **LORA))
    for version in range(3):
        await engine.publish(version)
        assert (await probed(engine)).is_same
        await engine.step(Batch(version + 1, random_calls(4)), SPEC)


async def test_weights_of_one_step_before_fail(make_engine: EngineMaker) -> None:
    engine = make_engine(DEMO_MODEL_DIR)
    await engine.boot(TrainJob(lr=1e-4, max_mismatch_k3=None))
    await engine.publish(0)
    await engine.step(Batch(1, random_calls(4)), SPEC)
    assert not (await probed(engine)).is_same
    await engine.publish(1)
    assert (await probed(engine)).is_same


async def test_weights_of_which_one_layer_is_stale_fail(make_engine: EngineMaker) -> None:
    engine = make_engine(DEMO_MODEL_DIR)
    await engine.boot(TrainJob(lr=1e-3, max_mismatch_k3=None))
    await engine.publish(0)
    before = {name: one.clone() for name, one in layer_of(engine).named_parameters()}
    await engine.step(Batch(1, random_calls(4)), SPEC)
    await engine.publish(1)
    assert (await probed(engine)).is_same
    with torch.no_grad():
        for name, parameter in layer_of(engine).named_parameters():
            parameter.copy_(before[name])
    assert not (await probed(engine)).is_same


async def test_a_probe_changes_no_answer(make_engine: EngineMaker) -> None:
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    quiet, asked = make_engine(seed=5), make_engine(seed=5)
    for engine in (quiet, asked):
        await engine.publish(0)
    for prompt in ([9, 10], [9, 10, 11], [9, 10]):
        await asked.probe()
        one = await collect(quiet.generate(prompt, sampling))
        other = await collect(asked.generate(prompt, sampling))
        assert [(token.id, token.logprob) for token in one] == [
            (token.id, token.logprob) for token in other
        ]


async def test_a_reply_goes_on_while_the_engine_is_probed(make_engine: EngineMaker) -> None:
    engine = make_engine()
    reply = engine.generate([9, 10], ENDLESS)
    await anext(reply)
    assert len((await engine.probe()).log_probs) == MAX_TOKENS - 1
    assert await anext(reply)
    await reply.aclose()


async def test_a_context_shorter_than_the_prompt_is_enough(make_engine: EngineMaker) -> None:
    engine = make_engine(max_model_len=16)
    assert len((await engine.probe()).ids) == 16
