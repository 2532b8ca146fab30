"""The ways to train some calls that benchmarks.forest compares. Each does forward and backward of
the sum of their log-probabilities, and returns how many tokens went through the model, padding
among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from benchmarks.forest_cases import BUDGET, VOCAB, Case, timelines
from fakevllm_server.forest import CallTokens, pack

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
attentions: Any = import_module("fakevllm_server.backends.torch_forest.attentions")
plans: Any = import_module("fakevllm_server.backends.torch_forest.plan")
forwards: Any = import_module("fakevllm_server.backends.torch_forest.forward")
sharing: Any = import_module("fakevllm_server.backends.torch_forest.sharing")

Way = Callable[[Any, Case], int]


def make_model() -> Any:
    """Random weights; a pair of tokens costs it a thousandth of a token."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32768,
    )
    return transformers.LlamaForCausalLM(config).eval()


def naive(model: Any, case: Case) -> int:
    """Rows of like lengths, padded, as trainers without a forest do it."""
    return _rows(model, case.calls, case.budget)


def flat_merge(model: Any, case: Case) -> int:
    """The same, of timelines: what AgentJet's merging comes to where it is exact."""
    return _rows(model, timelines(case.calls), case.budget)


def _rows(model: Any, calls: Sequence[CallTokens], budget: int) -> int:
    num_tokens = 0
    for piece in _padded_pieces(calls, budget):
        longest = max(len(call.ids) for call in piece)
        first = min(call.trained[0][0] for call in piece) - 1
        ids = torch.zeros(len(piece), longest, dtype=torch.long)
        mask = torch.zeros(len(piece), longest - 1)
        for row, call in enumerate(piece):
            ids[row, : len(call.ids)] = torch.tensor(list(call.ids))
            for start, end in call.trained:
                mask[row, start - 1 : end - 1] = 1
        kept = longest - first
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[:, :-1]
        chosen = logits.gather(2, ids[:, first + 1 :, None])[:, :, 0] - logits.logsumexp(-1)
        (chosen * mask[:, first:]).sum().backward()
        num_tokens += ids.numel()
    return num_tokens


def _padded_pieces(calls: Sequence[CallTokens], budget: int) -> list[list[CallTokens]]:
    pieces: list[list[CallTokens]] = []
    for call in sorted(calls, key=lambda call: -len(call.ids)):
        if pieces and len(pieces[-1][0].ids) * (len(pieces[-1]) + 1) <= budget:
            pieces[-1].append(call)
        else:
            pieces.append([call])
    return pieces


def merged(attention: str) -> Way:
    def train(model: Any, case: Case) -> int:
        num_tokens = 0
        for piece in pack(sharing.worth_sharing(case.calls), case.budget):
            plan = plans.Plan.of(piece.forest)
            way = attentions.quickest(plan, "chains") if attention == "quickest" else attention
            plan.flat(forwards.edge_log_probs(model, plan, way)).sum().backward()
            num_tokens += piece.forest.num_naive if way == "rows" else piece.forest.num_nodes
        return num_tokens

    return train


def budgets_matter(case: Case) -> str:
    """How much is shared where pieces are as small as by default."""
    calls = sharing.worth_sharing(case.calls)
    num_naive = sum(len(call.ids) for call in calls)
    rho = {
        budget: num_naive / sum(piece.forest.num_nodes for piece in pack(calls, budget))
        for budget in (BUDGET, case.budget)
    }
    return ", ".join(f"rho {own:.2f} in pieces of {budget} tokens" for budget, own in rho.items())


WAYS: dict[str, Way] = {
    "naive": naive,
    "flat merge": flat_merge,
    "dense": merged("dense"),
    "segments": merged("segments"),
    "chains": merged("chains"),
    "quickest": merged("quickest"),
}
OURS = "quickest"
"""What the embedded trainer takes."""
