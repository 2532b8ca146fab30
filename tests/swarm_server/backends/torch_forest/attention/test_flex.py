from __future__ import annotations

import random
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from swarm_server.backends.torch_forest.tiny_models import (
    MODELS,
    SIZES,
    VOCAB,
    build_model,
    gradient_of,
)
from swarm_server.forest.call_sets import call_sets
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from fakevllm_server.backends.torch_forest.attention import flex
from fakevllm_server.backends.torch_forest.attention.dense import DenseLayout
from fakevllm_server.backends.torch_forest.attention.flex import BLOCK, FlexLayout, block_mask
from fakevllm_server.backends.torch_forest.attention_check import (
    check_calls,
    check_sharing_attention,
)
from fakevllm_server.backends.torch_forest.autocast import set_compute_dtype
from fakevllm_server.backends.torch_forest.edge_log_probs import edge_log_probs
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.forest import CallTokens, build_forest

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
SIZE = 4


@cache
def model_of(name: str) -> Any:
    return build_model(MODELS[name])


def as_dense(mask: BlockMask, num_nodes: int) -> Tensor:
    """Expand a block mask as a kernel interprets it, to [nodes, nodes] of bool."""
    size = mask.BLOCK_SIZE[0]
    dense = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
    node = torch.arange(num_nodes)
    mask_mod: Any = mask.mask_mod
    exact = mask_mod(torch.tensor(0), torch.tensor(0), node[:, None], node[None, :])
    for counts, indices, is_whole in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        assert counts is not None and indices is not None
        for query, count in enumerate(counts[0, 0].tolist()):
            for key in indices[0, 0, query, :count].tolist():
                at = (slice(query * size, (query + 1) * size), slice(key * size, (key + 1) * size))
                assert not dense[at].any(), "a block is in one of the lists"
                dense[at] = True if is_whole else exact[at]
    return dense


@pytest.mark.parametrize("window", [None, 1, 3])
@settings(max_examples=60)
@given(calls=call_sets(max_calls=8))
def test_a_block_mask_is_the_mask_of_all_pairs(window: int | None, calls: list[CallTokens]) -> None:
    plan = Plan.of(build_forest(calls))
    num_nodes = len(plan.ids)
    added = torch.arange(num_nodes, num_nodes + -num_nodes % SIZE)
    tout = torch.cat([torch.tensor(list(plan.forest.tout), dtype=torch.long), added + 1])
    pos = torch.cat([plan.pos, torch.zeros_like(added)])
    dense = as_dense(block_mask(tout, pos, window, SIZE), len(tout))
    assert torch.equal(dense[:num_nodes, :num_nodes], DenseLayout(plan).visible(window))
    assert torch.equal(dense[num_nodes:, num_nodes:], torch.eye(len(added), dtype=torch.bool))
    assert not dense[:num_nodes, num_nodes:].any() and not dense[num_nodes:, :num_nodes].any()


def test_blocks_without_visible_pairs_are_skipped() -> None:
    calls = [CallTokens.of([1, 2, 3, 4], [first, *[0] * 7]) for first in range(5, 11)]
    plan = Plan.of(build_forest(calls))
    mask = block_mask(torch.tensor(list(plan.forest.tout)), plan.pos, None, SIZE)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks[0, 0].tolist() == [0, 1, 2] + [1, 2] * 5
    assert mask.kv_num_blocks[0, 0].tolist() == [1] * 13


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=4)
@given(calls=call_sets())
def test_log_probs_of_flex_equal_those_of_the_dense_mask(
    name: str, calls: list[CallTokens]
) -> None:
    model = model_of(name)
    plan = Plan.of(build_forest(calls))
    with torch.no_grad():
        actual, expected = (edge_log_probs(model, plan, name) for name in ("flex", "dense"))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def by_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    block_mask: BlockMask,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """Compute attention from the lists of blocks as the kernels do, with a backward pass."""
    visible = as_dense(block_mask, query.shape[2])
    return scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
    )


def without_whole_blocks(
    query: Tensor, *arguments: Tensor, block_mask: BlockMask, **named: Any
) -> Any:
    assert block_mask.full_kv_num_blocks is not None
    block_mask.full_kv_num_blocks.zero_()
    return by_blocks(query, *arguments, block_mask=block_mask, **named)


def without_later_queries(query: Tensor, *arguments: Tensor, **named: Any) -> Any:
    attended = by_blocks(query, *arguments, **named)
    first, later = attended[:, :, :BLOCK], attended[:, :, BLOCK:]
    return torch.cat([first, later.detach()], dim=2)


@pytest.mark.parametrize("name", MODELS)
def test_the_check_calls_for_flex_have_whole_and_partial_blocks(name: str) -> None:
    calls = check_calls(model_of(name).config, "flex")
    mask = FlexLayout(Plan.of(build_forest(calls))).block_mask(None)
    assert mask.full_kv_num_blocks is not None
    per_query = mask.full_kv_num_blocks[0, 0]
    assert per_query.max() >= 3 and (per_query > 0).sum() > 1
    assert mask.kv_num_blocks.sum() > len(per_query), "some blocks are partly visible"


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (by_blocks, None),
        (without_whole_blocks, "wrong log-probabilities"),
        (without_later_queries, "wrong gradients"),
    ],
)
def test_the_attention_check_detects_a_kernel_that_skips_blocks(
    kernel: Any, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda device_type: kernel)
    fault = check_sharing_attention(model_of("llama"), "flex").fault
    assert fault is None if message is None else message in (fault or "")


@pytest.mark.parametrize("name", MODELS)
def test_a_correct_kernel_passes_in_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda device_type: by_blocks)
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    set_compute_dtype(model, torch.bfloat16)
    check = check_sharing_attention(model, "flex")
    assert check.fault is None and check.gradient > 1e-4, "bfloat16 is really used"


HEAD_DIM = 16
"""Smallest head dimension that CUDA's kernels support."""
WINDOW = 300
"""Shorter than a call, and long enough for blocks that lie completely within the window."""

ROUNDING = 1e-5
"""Relative rounding error of another kernel in float32."""


def long_calls() -> list[CallTokens]:
    """Return siblings of one prompt, and a next turn of the conversation after each answer."""
    rng = random.Random(0)

    def random_ids(number: int) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(number)]

    prompt, answers = random_ids(320), [random_ids(number) for number in (150, 40, 90)]
    turns = [
        CallTokens.of([*prompt, *answer, *random_ids(7)], random_ids(60)) for answer in answers
    ]
    return [CallTokens.of(prompt, answer) for answer in answers] + turns


def wide_model(window: int | None) -> Any:
    """Return a float32 model on the CPU, with the same weights at each call."""
    torch.manual_seed(0)
    sizes = SIZES | {"head_dim": HEAD_DIM, "initializer_range": 0.2}
    if window is None:
        return LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=window)).eval()


class Result(NamedTuple):
    log_prob: Tensor
    gradient: Tensor
    """Gradient of all weights, flat."""


def compute(model: Any, attention: str | None, *, with_gradient: bool) -> Result:
    """Return log-probabilities and gradient. If `attention` is None, the plain model computes calls
    one by one."""
    calls = long_calls()
    with torch.set_grad_enabled(with_gradient):
        if attention is None:
            log_prob = torch.cat([one_by_one(model, call) for call in calls])
        else:
            plan = Plan.of(build_forest(calls), model.device)
            log_prob = plan.flat(edge_log_probs(model, plan, attention))
        signs = torch.arange(len(log_prob), device=model.device) % 3 - 1.5
        gradient = gradient_of(model, (log_prob * signs).mean())
    return Result(log_prob.detach().double().cpu(), gradient.double().cpu())


def one_by_one(model: Any, call: CallTokens) -> Tensor:
    ids = torch.tensor([list(call.ids)], device=model.device)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([log_probs[start - 1 : end - 1] for start, end in call.trained])


CUDA = [
    pytest.param(attention, "cuda", None, marks=pytest.mark.gpu)
    for attention in ("flex", "segments", "dense")
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize(
    ("attention", "device", "kernel"),
    [("segments", "cpu", None), ("flex", "cpu", None), ("flex", "cpu", by_blocks), *CUDA],
)
def test_log_probs_of_long_calls_are_as_close_to_float64_as_the_model_itself(
    attention: str,
    device: str,
    kernel: Any,
    window: int | None,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test compares log-probabilities and the gradients of all weights. torch's FlexAttention
    has no gradient on a CPU."""
    if kernel is not None:
        monkeypatch.setattr(flex, "_compiled", lambda device_type: kernel)
    with_gradient = attention != "flex" or device == "cuda" or kernel is not None
    mask = FlexLayout(Plan.of(build_forest(long_calls()))).block_mask(window)
    assert mask.full_kv_num_blocks is not None and mask.full_kv_num_blocks.sum() > 0
    exact = compute(wide_model(window).double(), None, with_gradient=with_gradient)
    model = wide_model(window).to(device)
    set_compute_dtype(model, dtype)
    assert model.config.head_dim == HEAD_DIM
    naive = compute(model, None, with_gradient=with_gradient)
    forest = compute(model, attention, with_gradient=with_gradient)
    for right, plain, actual in zip(exact, naive, forest, strict=True):
        noise = (plain - right).norm()
        assert noise <= 0.1 * right.norm(), "the model itself is precise enough for the comparison"
        assert (actual - right).norm() <= 2 * noise + ROUNDING * right.norm()
    assert bool(forest.gradient.count_nonzero()) is with_gradient
