"""The ways to train some calls that benchmarks.forest compares. Each does forward and backward of
the sum of their log-probabilities, and returns how many tokens went through the model, padding
among them. They run where the model is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from benchmarks.forest_parts.cases import BUDGET, VOCAB, Case, timelines
from fakevllm_server.forest import CallTokens, pack

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
attentions: Any = import_module("fakevllm_server.backends.torch_forest.attentions")
plans: Any = import_module("fakevllm_server.backends.torch_forest.plan")
forwards: Any = import_module("fakevllm_server.backends.torch_forest.forward")
sharing: Any = import_module("fakevllm_server.backends.torch_forest.small_prefixes")

Way = Callable[[Any, Case], int]


class Passed(NamedTuple):
    """One piece, forward."""

    calls: Sequence[int]
    """Numbers of the calls in it."""
    log_prob: Any
    """[trained tokens], one call after another, at least float32."""
    num_trained: Sequence[int]
    """For each call how many of those are its own."""
    num_tokens: int
    """That went through the model."""


Pass = Callable[[Any, Case], Iterator[Passed]]


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


def naive(model: Any, case: Case) -> Iterator[Passed]:
    """Rows of like lengths, padded, as trainers without a forest do it."""
    return _rows(model, case.calls, case.budget)


def alone(model: Any, case: Case) -> Iterator[Passed]:
    """One call after the other: what naive rows differ from by no more than rounding."""
    return _rows(model, case.calls, 0)


def flat_merge(model: Any, case: Case) -> Iterator[Passed]:
    """Naive rows of timelines: what AgentJet's merging comes to where it is exact."""
    return _rows(model, timelines(case.calls), case.budget)


def _rows(model: Any, calls: Sequence[CallTokens], budget: int) -> Iterator[Passed]:
    for numbers in _padded_pieces(calls, budget):
        piece = [calls[number] for number in numbers]
        longest = max(len(call.ids) for call in piece)
        first = min(call.trained[0][0] for call in piece) - 1
        ids = torch.zeros(len(piece), longest, dtype=torch.long)
        mask = torch.zeros(len(piece), longest - 1, dtype=torch.bool)
        for row, call in enumerate(piece):
            ids[row, : len(call.ids)] = torch.tensor(list(call.ids))
            for start, end in call.trained:
                mask[row, start - 1 : end - 1] = True
        ids = ids.to(model.device)
        kept = longest - first
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits[:, :-1].float()
        chosen = logits.gather(2, ids[:, first + 1 :, None])[:, :, 0] - logits.logsumexp(-1)
        log_prob = chosen[mask[:, first:].to(model.device)]
        yield Passed(numbers, log_prob, mask.sum(1).tolist(), ids.numel())


def _padded_pieces(calls: Sequence[CallTokens], budget: int) -> list[list[int]]:
    """Numbers of calls; one alone where the budget has room for none."""
    pieces: list[list[int]] = []
    for number in sorted(range(len(calls)), key=lambda number: -len(calls[number].ids)):
        if pieces and len(calls[pieces[-1][0]].ids) * (len(pieces[-1]) + 1) <= budget:
            pieces[-1].append(number)
        else:
            pieces.append([number])
    return pieces


def merged(attention: str) -> Pass:
    def passes(model: Any, case: Case) -> Iterator[Passed]:
        for piece in pack(sharing.unshare_small_prefixes(case.calls), case.budget):
            plan = plans.Plan.of(piece.forest, model.device)
            way = (
                attentions.fastest_attention(plan, "chains")
                if attention == "quickest"
                else attention
            )
            log_prob = plan.flat(forwards.edge_log_probs(model, plan, way))
            num_tokens = piece.forest.num_naive if way == "rows" else piece.forest.num_nodes
            yield Passed(piece.calls, log_prob, plan.num_trained, num_tokens)

    return passes


def trained(passes: Pass) -> Way:
    def train(model: Any, case: Case) -> int:
        num_tokens = 0
        for one in passes(model, case):
            one.log_prob.sum().backward()
            num_tokens += one.num_tokens
        return num_tokens

    return train


def budgets_matter(case: Case) -> str:
    """How much is shared where pieces are as small as by default."""
    calls = sharing.unshare_small_prefixes(case.calls)
    num_naive = sum(len(call.ids) for call in calls)
    rho = {
        budget: num_naive / sum(piece.forest.num_nodes for piece in pack(calls, budget))
        for budget in (BUDGET, case.budget)
    }
    return ", ".join(f"rho {own:.2f} in pieces of {budget} tokens" for budget, own in rho.items())


WAYS: dict[str, Way] = {
    "naive": trained(naive),
    "flat merge": trained(flat_merge),
    "dense": trained(merged("dense")),
    "segments": trained(merged("segments")),
    "chains": trained(merged("chains")),
    "quickest": trained(merged("quickest")),
}
OURS = "quickest"
"""What the embedded trainer takes."""
