from __future__ import annotations

from typing import Any

import pytest
import torch
from swarm_server.backends.torch_forest.tiny_models import MODELS, SIZES, llama, mistral
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from fakevllm_server.backends.embedded.lora import insert_adapters
from fakevllm_server.backends.torch_forest.attention.chain_attention import ChainLayout
from fakevllm_server.backends.torch_forest.attention.dense import DenseLayout
from fakevllm_server.backends.torch_forest.attention.registry import (
    ATTENTIONS,
    default_attention,
    fastest_attention,
)
from fakevllm_server.backends.torch_forest.attention.transformers_hook import head_states
from fakevllm_server.backends.torch_forest.attention_check import (
    TOLERANCE,
    check_attention,
    check_sharing_attention,
)
from fakevllm_server.backends.torch_forest.autocast import set_compute_dtype
from fakevllm_server.backends.torch_forest.edge_log_probs import edge_values
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.backends.torch_forest.supported_models import sharing_refusal
from fakevllm_server.backends.training.lora_settings import LoraSettings
from fakevllm_server.forest import CallTokens, build_forest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["chains", "segments", "dense"])
@pytest.mark.parametrize("name", MODELS)
def test_supported_models_pass_the_attention_check(
    name: str, attention: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).eval()
    check = check_sharing_attention(model, attention)
    assert check.fault is None
    assert 0 < check.gradient < TOLERANCE[dtype]


@pytest.mark.parametrize("attention", ["chains", "segments", "dense", "rows"])
@pytest.mark.parametrize("name", MODELS)
def test_supported_models_pass_in_bfloat16_over_float32_weights(name: str, attention: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    set_compute_dtype(model, torch.bfloat16)
    check = check_sharing_attention(model, attention)
    assert check.fault is None
    assert 1e-4 < check.gradient < TOLERANCE[torch.bfloat16], "bfloat16 is really used"


def attend_to_all(model: Any, plan: Plan) -> Tensor:
    """A wrong attention to all earlier nodes, including those of siblings."""
    layout = DenseLayout(plan)
    layout._visible = torch.ones_like(layout._visible).tril()
    return head_states(model, plan, layout)


class _NoGradient(ChainLayout):
    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        return super().attend(query, key.detach(), value, scale, window)


def no_gradient(model: Any, plan: Plan) -> Tensor:
    return head_states(model, plan, _NoGradient(plan))


def raising(model: Any, plan: Plan) -> Tensor:
    raise RuntimeError("no such kernel\nand a stack")


def not_a_number(model: Any, plan: Plan) -> Tensor:
    return ATTENTIONS["chains"](model, plan) * float("nan")


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (attend_to_all, "gives wrong log-probabilities (off by "),
        (no_gradient, "gives wrong gradients (off by "),
        (not_a_number, "gives wrong log-probabilities (off by nan"),
        (raising, "fails on this model (RuntimeError: no such kernel)"),
    ],
)
def test_the_attention_check_names_a_wrong_attention(
    attention: Any, message: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setitem(ATTENTIONS, "wrong", attention)
    fault = check_sharing_attention(llama().to(dtype).eval(), "wrong").fault
    assert fault is not None and f"attention wrong {message}" in fault


def test_a_model_that_is_not_trained_is_checked_by_its_log_probs() -> None:
    model = llama().eval().requires_grad_(False)
    check = check_sharing_attention(model, "chains")
    assert check.fault is None and check.gradient == 0


@pytest.mark.parametrize(
    ("attention", "message"),
    [(attend_to_all, "wrong log-probabilities"), (no_gradient, "wrong gradients")],
)
def test_the_attention_check_names_a_wrong_attention_in_bfloat16_over_float32(
    attention: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = llama().eval()
    set_compute_dtype(model, torch.bfloat16)
    monkeypatch.setitem(ATTENTIONS, "wrong", attention)
    assert message in (check_sharing_attention(model, "wrong").fault or "")


def with_fresh_adapters() -> Any:
    """Return a model with new adapters, whose B is 0, so that the gradients of A are 0."""
    torch.manual_seed(0)
    model = llama().eval()
    insert_adapters(model, LoraSettings(rank=2, alpha=4, target_modules="k_proj,v_proj"), seed=0)
    return model


@pytest.mark.parametrize("attention", ["chains", "segments", "dense", "rows"])
def test_a_new_adapter_passes_the_attention_check_by_its_nonzero_gradients(attention: str) -> None:
    model = with_fresh_adapters()
    first = next(weight for weight in model.parameters() if weight.requires_grad)
    check = check_sharing_attention(model, attention)
    assert check.fault is None and 0 < check.gradient < TOLERANCE[torch.float32]
    plan = Plan.of(build_forest([CallTokens.of([1, 2], [3, 4])]))
    edge_values(model, plan, "rows").log_prob.sum().backward()
    assert first.grad.count_nonzero() == 0, "the gradient of one weight would not be enough"


def test_the_attention_check_detects_a_lost_gradient_of_an_adapter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(ATTENTIONS, "wrong", no_gradient)
    assert "wrong gradients" in (
        check_sharing_attention(with_fresh_adapters(), "wrong").fault or ""
    )


def test_weights_without_a_gradient_pass_unless_an_attention_gives_them_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = llama().eval().requires_grad_(False)
    model.unused = nn.Parameter(torch.zeros(SIZES["hidden_size"]))

    def reaching(model: Any, plan: Plan) -> Tensor:
        return ATTENTIONS["chains"](model, plan) + model.unused

    def zero(model: Any, plan: Plan) -> Tensor:
        return ATTENTIONS["chains"](model, plan) + 0 * model.unused

    for attention, is_right in ((zero, True), (reaching, False)):
        monkeypatch.setitem(ATTENTIONS, "odd", attention)
        check = check_sharing_attention(model, "odd")
        assert (check.fault is None) is is_right
        assert check.gradient == (0 if is_right else float("inf"))


def test_the_attention_check_detects_a_lost_window(monkeypatch: pytest.MonkeyPatch) -> None:
    class Windowless(DenseLayout):
        def visible(self, window: int | None) -> Tensor:
            return super().visible(None)

    def attention(model: Any, plan: Plan) -> Tensor:
        return head_states(model, plan, Windowless(plan))

    monkeypatch.setitem(ATTENTIONS, "wrong", attention)
    assert "wrong log-probabilities" in (
        check_sharing_attention(mistral().eval(), "wrong").fault or ""
    )


def test_the_default_attention_on_a_cpu_is_chains() -> None:
    assert default_attention(torch.device("cpu")) == "chains"


def test_a_piece_that_shares_almost_nothing_uses_rows() -> None:
    apart = [CallTokens.of([0, *[first] * 20], [1]) for first in range(1, 9)]
    together = [CallTokens.of([0] * 20, [last]) for last in range(1, 9)]
    assert fastest_attention(Plan.of(build_forest(apart)), "chains") == "rows"
    assert fastest_attention(Plan.of(build_forest(together)), "chains") == "chains"


def test_dropout_and_unknown_layers_are_refused() -> None:
    dropping = llama(attention_dropout=0.1)
    assert sharing_refusal(dropping.eval()) is None
    assert "dropout" in (sharing_refusal(dropping.train()) or "")
    odd = llama()
    odd.config.layer_types = ["full_attention", "conv"]
    assert sharing_refusal(odd) == "layers of type conv cannot share prefixes"
    both = llama()
    both.config.is_causal = False
    assert sharing_refusal(both) == "its attention is not causal"


def test_a_prompt_adapter_is_refused() -> None:
    class Adapted(nn.Module):
        def __init__(self, kind: str, dropout: float) -> None:
            super().__init__()
            settings = {"peft_type": kind, "lora_dropout": dropout}
            self.peft_config = {"default": type("Config", (), settings)()}
            self.config = llama().config

    assert "PREFIX_TUNING" in (sharing_refusal(Adapted("PREFIX_TUNING", 0.0).eval()) or "")
    assert "dropout" in (sharing_refusal(Adapted("LORA", 0.1).train()) or "")
    assert sharing_refusal(Adapted("LORA", 0.0).train()) is None


LOGIT_TRANSFORMING: list[Any] = [
    GraniteConfig(**SIZES, logits_scaling=8.0),
    Gemma2Config(**SIZES, head_dim=4, final_logit_softcapping=1.0),
    CohereConfig(**SIZES, logit_scale=0.0625),
]


@pytest.mark.parametrize("config", LOGIT_TRANSFORMING, ids=lambda config: config.model_type)
def test_rows_apply_a_models_own_transformation_of_logits(config: Any) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    assert check_sharing_attention(model, "chains").fault is not None
    assert check_attention(model, "rows").fault is None


def test_an_unknown_transformation_of_logits_is_detected() -> None:
    model = llama().float().eval()
    model.forward = lambda *args, **named: _doubled(type(model).forward(model, *args, **named))
    fault = check_attention(model, "rows").fault
    assert fault is not None and "wrong log-probabilities" in fault


def _doubled(output: Any) -> Any:
    output.logits = output.logits * 2
    return output


def test_an_entropy_that_does_not_train_has_no_graph() -> None:
    plan = Plan.of(build_forest([CallTokens.of([1, 2], [3, 4])]))
    model = llama()
    untrained = edge_values(model, plan, "rows", with_entropy=True, entropy_trains=False)
    trained = edge_values(model, plan, "rows", with_entropy=True)
    assert untrained.entropy is not None and not untrained.entropy.requires_grad
    assert trained.entropy is not None and trained.entropy.requires_grad
    assert torch.equal(untrained.entropy, trained.entropy) and untrained.log_prob.requires_grad
