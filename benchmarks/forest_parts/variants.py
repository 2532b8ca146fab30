"""The variants of a training step that benchmarks.forest compares.

Each variant runs a forward and a backward pass of the sum of the trained tokens' log-probabilities,
on the model's device. A variant returns the number of tokens that went through the model, including
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from benchmarks.forest_parts.cases import BUDGET, VOCAB, Case, merge_extending_calls
from fakevllm_server.forest import CallTokens, pack

torch: Any = import_module("torch")
transformers: Any = import_module("transformers")
attentions: Any = import_module("fakevllm_server.backends.torch_forest.attention.registry")
plans: Any = import_module("fakevllm_server.backends.torch_forest.forward_plan")
forwards: Any = import_module("fakevllm_server.backends.torch_forest.edge_log_probs")
sharing: Any = import_module("fakevllm_server.backends.torch_forest.prefix_sharing")

Variant = Callable[[Any, Case], int]
"""Function of a model and a case that accumulates gradients and returns the number of computed
tokens."""


class PieceResult(NamedTuple):
    """Result of the forward pass of one piece."""

    calls: Sequence[int]
    """Indices of the piece's calls in the case."""
    log_prob: Any
    """Log-probabilities, [trained tokens], one call after another, float32 or wider."""
    num_trained: Sequence[int]
    """Number of trained tokens of each call."""
    num_tokens: int
    """Number of tokens that went through the model, including padding."""


ForwardPass = Callable[[Any, Case], Iterator[PieceResult]]
"""Function of a model and a case that yields the result of each piece."""


def make_model() -> Any:
    """Return a small Llama with random weights.

    In this model, attention between two tokens needs a thousandth of the computation that one token
    needs in the other layers.
    """
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


def naive(model: Any, case: Case) -> Iterator[PieceResult]:
    """Compute padded rows of similar lengths, as trainers without a forest do."""
    return _rows(model, case.calls, case.budget)


def flat_merge(model: Any, case: Case) -> Iterator[PieceResult]:
    """Merge calls that extend each other, and compute the merged calls as naive rows. AgentJet
    merges calls in the same way, but also where the merge is not exact."""
    return _rows(model, merge_extending_calls(case.calls), case.budget)


def _rows(model: Any, calls: Sequence[CallTokens], budget: int) -> Iterator[PieceResult]:
    for indices in _padded_pieces(calls, budget):
        piece = [calls[index] for index in indices]
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
        yield PieceResult(indices, log_prob, mask.sum(1).tolist(), ids.numel())


def _padded_pieces(calls: Sequence[CallTokens], budget: int) -> list[list[int]]:
    """Return the indices of the calls of each piece. A call with more tokens than the budget is a
    piece of its own."""
    pieces: list[list[int]] = []
    for index in sorted(range(len(calls)), key=lambda index: -len(calls[index].ids)):
        if pieces and len(calls[pieces[-1][0]].ids) * (len(pieces[-1]) + 1) <= budget:
            pieces[-1].append(index)
        else:
            pieces.append([index])
    return pieces


def forest_pass(attention: str) -> ForwardPass:
    """Return a pass over the calls' forest with an attention of this name.

    "quickest" selects the attention as the trainer does.
    """

    def run(model: Any, case: Case) -> Iterator[PieceResult]:
        for piece in pack(sharing.unshare_small_prefixes(case.calls), case.budget):
            plan = plans.Plan.of(piece.forest, model.device)
            name = (
                attentions.fastest_attention(plan, "chains")
                if attention == "quickest"
                else attention
            )
            log_prob = plan.flat(forwards.edge_log_probs(model, plan, name))
            num_tokens = piece.forest.num_naive if name == "rows" else piece.forest.num_nodes
            yield PieceResult(piece.calls, log_prob, plan.num_trained, num_tokens)

    return run


def with_backward(forward_pass: ForwardPass) -> Variant:
    """Return the variant that runs the pass and the backward pass of each piece."""

    def train(model: Any, case: Case) -> int:
        num_tokens = 0
        for result in forward_pass(model, case):
            result.log_prob.sum().backward()
            num_tokens += result.num_tokens
        return num_tokens

    return train


def describe_sharing(case: Case) -> str:
    """Return the sharing factor rho of the case as text, for pieces of the default size and for
    pieces of the case's own size."""
    calls = sharing.unshare_small_prefixes(case.calls)
    num_naive = sum(len(call.ids) for call in calls)
    rho = {
        budget: num_naive / sum(piece.forest.num_nodes for piece in pack(calls, budget))
        for budget in (BUDGET, case.budget)
    }
    return ", ".join(f"rho {own:.2f} in pieces of {budget} tokens" for budget, own in rho.items())


VARIANTS: dict[str, Variant] = {
    "naive": with_backward(naive),
    "flat merge": with_backward(flat_merge),
    "dense": with_backward(forest_pass("dense")),
    "segments": with_backward(forest_pass("segments")),
    "chains": with_backward(forest_pass("chains")),
    "quickest": with_backward(forest_pass("quickest")),
}
OURS = "quickest"
"""The variant that the embedded trainer uses."""
