"""What each GPU holds, and what the plan says if it does not fit."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from swarm_server.placement.plans import medium_shape, shape, small_shape, with_torch, with_verl

from fakevllm_server.placement.memory_parts import GIB, bytes_held, peak_bytes
from fakevllm_server.placement.memory_plan import (
    Deployment,
    gpu_roles,
    is_enough_memory,
    longest_training_call,
    plan_memory,
)
from fakevllm_server.placement.rollout_memory import kv_bytes_per_token
from fakevllm_server.placement.training_memory import TrainingSetup, training_parts

TOKENS = st.integers(1, 65536)
SETUPS = st.builds(
    TrainingSetup,
    is_verl=st.booleans(),
    num_gpus=st.integers(1, 64),
    pass_tokens=TOKENS,
    compute_bytes=st.sampled_from([2, 4]),
    is_recomputed=st.booleans(),
    lora_rank=st.sampled_from([0, 8]),
    needs_reference=st.booleans(),
)


def bytes_of(deployment: Deployment, part: str) -> int:
    (found,) = {
        one.num_bytes for role in gpu_roles(deployment) for one in role.parts if one.name == part
    }
    return found


@given(setup=SETUPS, more=st.integers(1, 64))
def test_more_training_gpus_never_need_more_bytes_per_gpu(setup: TrainingSetup, more: int) -> None:
    wider = replace(setup, num_gpus=setup.num_gpus + more)
    assert peak_bytes(training_parts(shape(), wider)) <= peak_bytes(training_parts(shape(), setup))


@given(setup=SETUPS, more=st.integers(1, 4096))
def test_longer_passes_never_need_fewer_bytes(setup: TrainingSetup, more: int) -> None:
    longer = replace(setup, pass_tokens=setup.pass_tokens + more)
    assert peak_bytes(training_parts(shape(), longer)) >= peak_bytes(training_parts(shape(), setup))


@given(setup=SETUPS)
def test_recomputing_and_adapters_never_need_more_bytes(setup: TrainingSetup) -> None:
    kept = peak_bytes(training_parts(shape(), replace(setup, is_recomputed=False)))
    if setup.pass_tokens > 1:  # the input of a layer is kept beside the activations of one layer
        assert peak_bytes(training_parts(shape(), replace(setup, is_recomputed=True))) <= kept
    full = peak_bytes(training_parts(shape(), replace(setup, lora_rank=0)))
    assert peak_bytes(training_parts(shape(), replace(setup, lora_rank=8))) <= full


@given(setup=SETUPS)
def test_every_formula_gives_the_bytes_that_stand_beside_it(setup: TrainingSetup) -> None:
    for part in training_parts(shape(), setup):
        if "estimate" in part.formula:
            continue
        text = re.sub(r"(?<=\d),(?=\d)", "", part.formula).partition(", ")[0]
        text = re.sub(r"[A-Za-z']+\d*(?<!x)|\bbfloat16\b", " ", text.replace(" x ", " * "))
        value = eval(text)  # only digits and operators are left
        assert abs(value - part.num_bytes) <= 1, (part, text)


@given(
    tensor_parallel=st.sampled_from([1, 2, 4]),
    memory_gib=st.floats(20, 200),
    utilization=st.floats(0.1, 1),
)
def test_vllm_fills_its_share_and_no_more_or_has_no_cache(
    tensor_parallel: int, memory_gib: float, utilization: float
) -> None:
    deployment = with_verl(
        tensor_parallel=tensor_parallel, memory_gib=memory_gib, utilization=utilization
    )
    parts = gpu_roles(deployment)[0].parts
    if deployment.cache_bytes:
        assert bytes_held(parts, "always") == deployment.rollout.budget_bytes
    else:
        assert bytes_held(parts, "always") >= deployment.rollout.budget_bytes


def test_tensor_parallelism_divides_weights_and_cache() -> None:
    one, two, eight = (with_verl(tensor_parallel=count) for count in (1, 2, 8))
    rows = [gpu_roles(deployment)[0].parts[0].num_bytes for deployment in (one, two)]
    assert rows[1] == rows[0] // 2
    per_token = [kv_bytes_per_token(one.shape, each.rollout) for each in (one, two, eight)]
    assert per_token == [57344, 28672, 14336]  # eight GPUs hold four heads: one each


def test_sleep_needs_less_than_sharing_and_more_than_the_trainer_alone() -> None:
    def peak(colocate: str) -> int:
        deployment = with_verl(colocate=colocate, training_gpus=8, utilization=0.5)
        return max(role.peak_bytes for role in gpu_roles(deployment))

    alone = gpu_roles(with_verl(training_gpus=8))[1].peak_bytes
    assert alone < peak("sleep") < peak("shared")


def test_colocated_gpus_are_listed_by_what_they_hold() -> None:
    roles = gpu_roles(with_verl(colocate="shared", tensor_parallel=2, training_gpus=6))
    assert [(role.name, role.gpus) for role in roles] == [
        ("samples with vLLM, and trains", range(2)),
        ("trains", range(2, 6)),
    ]
    roles = gpu_roles(with_verl(colocate="sleep", tensor_parallel=4, training_gpus=2))
    assert [(role.name, role.gpus) for role in roles] == [
        ("samples with vLLM, and trains", range(2)),
        ("samples with vLLM", range(2, 4)),
    ]


@pytest.mark.parametrize(
    ("deployment", "problem"),
    [
        (with_verl(tensor_parallel=3), "parallel is 3, and the model has 28 attention heads"),
        (
            with_verl(memory_gib=16, tensor_parallel=1, training_gpus=64, pass_tokens=512),
            "KV cache, and one request of 8,192 tokens needs .*: set tensor_parallel = 2",
        ),
        (with_verl(training_gpus=1), "GPU that trains needs .* has 79.00 GiB: set training_gpus"),
        (with_verl(pass_tokens=65536), "needs .*: lower micro_batch_tokens to "),
        (with_torch(utilization=0.9), "vLLM, and trains needs .*: lower --gpu-memory-utilization"),
        (with_torch(medium_shape()), "needs .*: train adapters \\(lora_rank = 16\\) with gradient"),
        (with_torch(memory_gib=4), "use GPUs with more memory, or a smaller model"),
    ],
)
def test_what_does_not_fit_is_one_line_with_a_remedy(deployment: Deployment, problem: str) -> None:
    plan = plan_memory(deployment)
    assert not plan.fits and not plan.notes
    assert any(re.search(problem, line) for line in plan.problems), plan.problems
    assert all("\n" not in line and line.endswith(".") for line in plan.problems)


@given(
    training_gpus=st.integers(1, 8),
    pass_tokens=st.integers(512, 65536),
    memory_gib=st.floats(8, 200),
)
def test_a_named_number_of_gpus_or_tokens_is_enough(**numbers: Any) -> None:
    deployment = with_verl(**numbers)
    for line in plan_memory(deployment).problems:
        if gpus := re.search(r"set training_gpus = (\d+)", line):
            changed = replace(deployment.training, num_gpus=int(gpus[1]))
            assert is_enough_memory(replace(deployment, training=changed))
            fewer = replace(changed, num_gpus=changed.num_gpus - 1)
            assert not is_enough_memory(replace(deployment, training=fewer))
        if tokens := re.search(r"lower micro_batch_tokens to (\d+)", line):
            changed = replace(deployment.training, pass_tokens=int(tokens[1]))
            assert is_enough_memory(replace(deployment, training=changed))


def test_a_call_that_can_be_sampled_and_not_trained_is_noted() -> None:
    deployment = with_verl(max_model_len=32768, pass_tokens=4096)
    longest = longest_training_call(deployment)
    plan = plan_memory(deployment)
    assert plan.fits and len(plan.notes) == 1
    assert f"calls above {longest:,} tokens do not fit into a training pass" in plan.notes[0]
    for tokens, fits in ((longest, True), (longest + 1, False)):
        changed = replace(deployment.training, pass_tokens=tokens)
        assert is_enough_memory(replace(deployment, training=changed)) is fits
    shorter = replace(deployment.rollout, max_model_len=longest)
    assert not plan_memory(replace(deployment, rollout=shorter)).notes


def test_the_embedded_engine_keeps_sampler_and_trainer_on_one_gpu() -> None:
    deployment = replace(with_torch(small_shape()), has_vllm=False)
    (role,) = gpu_roles(deployment)
    assert role.gpus == range(1)
    weights = 2 * small_shape().num_parameters
    assert bytes_of(deployment, "sampler's weights") == weights
    adapters = replace(deployment, training=replace(deployment.training, lora_rank=8))
    names = [part.name for part in gpu_roles(adapters)[0].parts]
    assert "sampler's weights" not in names and "prefix cache" in names
    assert bytes_of(deployment, "prefix cache") == int(0.04 * 79 * GIB)
