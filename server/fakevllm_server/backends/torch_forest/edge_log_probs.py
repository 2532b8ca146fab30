"""Compute the log-probabilities of the trained tokens of a piece. A prediction that several calls
share is computed once.

A piece is a set of calls that go through the model together. The calls of a piece form a forest, in
which each node is one token and calls with a common prefix share nodes. A head is a node that
predicts tokens, at one temperature and from one set of allowed tokens. An edge is one token that is
predicted by a head:

    log_prob[e] = log_softmax(logits[head of e] / temperature of the head)[token of e]

The logits of tokens outside the allowed set are -inf. `Plan.flat` and `Plan.per_call` convert the
values of edges to values of the calls' tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fakevllm_server.backends.torch_forest.attention.registry import ATTENTIONS
from fakevllm_server.backends.torch_forest.attention.transformers_hook import causal_model
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.backends.torch_forest.gathered_weights import forward_of, run_gathered
from fakevllm_server.types.token_masks import unpacked


class EdgeValues(NamedTuple):
    """Values of all edges of a piece. A piece is a set of calls that go through the model together.
    An edge is a token that is predicted in the piece. Several calls may share one edge."""

    log_prob: Tensor
    """[edges] Log-probability of the edge's token, in float32 or a wider dtype."""
    entropy: Tensor | None
    """[edges] Entropy in nats of the distribution that the edge's token was sampled from. None if
    the entropy was not requested."""


def edge_values(
    model: Any,
    plan: Plan,
    attention: str,
    *,
    with_entropy: bool = False,
    entropy_trains: bool = True,
    max_logits: int | None = None,
) -> EdgeValues:
    """Run one forward pass of a piece (a set of calls that go through the model together). Return
    the log-probability of each edge (predicted token). If `with_entropy` is true, also return the
    entropy of each edge's distribution. `attention` is the name of a method in ATTENTIONS.

    If the loss does not use the entropy, set `entropy_trains` to False. Otherwise a gradient graph
    of the entropy keeps logits in memory, although no backward pass uses this graph.

    At most `max_logits` logits are in memory at a time. If a piece has more logits, they are
    computed in several chunks, and computed again in the backward pass. If the piece has no trained
    tokens, the model does not run, and the returned tensors are empty.
    """
    if not plan.num_edges:
        empty = torch.zeros(0, device=plan.device)
        return EdgeValues(empty, empty if with_entropy else None)
    head_values = partial(_head_values, with_entropy=with_entropy, entropy_trains=entropy_trains)

    def run_model() -> EdgeValues:
        hidden = ATTENTIONS[attention](model, plan)
        lm_head = causal_model(model).get_output_embeddings()
        log_probs, entropies = run_gathered(lm_head, run_head, hidden)
        return EdgeValues(log_probs, entropies if with_entropy else None)

    def run_head(hidden: Tensor) -> tuple[Tensor, Tensor]:
        chunks = _chunks(model, len(hidden), max_logits)
        inputs = [_chunk_inputs(model, plan, hidden, first, last) for first, last in chunks]
        if len(inputs) == 1:
            return head_values(*inputs[0])
        values: list[Any] = [
            checkpoint(head_values, *chunk, use_reentrant=False) for chunk in inputs
        ]
        log_probs, entropies = zip(*values, strict=True)
        return torch.cat(log_probs), torch.cat(entropies)

    return run_gathered(model, run_model)


def edge_log_probs(
    model: Any, plan: Plan, attention: str, *, max_logits: int | None = None
) -> Tensor:
    """Return the log-probabilities of all edges (predicted tokens) of a piece, as a tensor [edges].
    A piece is a set of calls that go through the model together. The arguments are those of
    `edge_values`."""
    return edge_values(model, plan, attention, max_logits=max_logits).log_prob


def _chunks(model: Any, num_heads: int, max_logits: int | None) -> list[tuple[int, int]]:
    """Divide the heads 0 to `num_heads` - 1 into consecutive ranges [first, last), and return the
    ranges. A head (a node that predicts tokens) has one logit per token of the vocabulary. A range
    has at most `max_logits` logits, but at least one head."""
    size = num_heads
    if max_logits is not None:
        size = max(1, max_logits // causal_model(model).config.get_text_config().vocab_size)
    return [(first, min(first + size, num_heads)) for first in range(0, num_heads, size)]


def _chunk_inputs(model: Any, plan: Plan, hidden: Tensor, first: int, last: int) -> tuple[Any, ...]:
    """Return the positional arguments of `_head_values` for the heads `first` to `last` - 1. A head
    is a node that predicts tokens. The arguments include the tokens that these heads predict."""
    edges = plan.forest.edges
    begin, end = edges.head_start[first], edges.head_start[last]
    return (
        causal_model(model).get_output_embeddings(),
        causal_model(model).config.get_text_config(),
        hidden[first:last],
        plan.head_temperature[first:last],
        HeadTokenSets(edges.sets, edges.head_set[first:last]),
        plan.edge_head[begin:end] - first,
        plan.edge_token[begin:end],
    )


def _head_values(
    lm_head: Any,
    config: Any,
    hidden: Tensor,
    temperature: Tensor,
    token_sets: HeadTokenSets,
    edge_head: Tensor,
    edge_token: Tensor,
    *,
    with_entropy: bool,
    entropy_trains: bool,
) -> tuple[Tensor, Tensor]:
    """Return two tensors [edges]: the log-probabilities and the entropies of the edges (predicted
    tokens) of some heads (nodes that predict tokens). `hidden` has the hidden states of these
    heads, [heads, hidden]. If `with_entropy` is false, the second tensor is empty."""
    logits = _apply_logit_transforms(config, forward_of(lm_head)(hidden))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if (temperature != 1).any():
        logits = logits / temperature.to(logits)[:, None]
    disallowed = token_sets.disallowed(logits)
    if disallowed is not None:
        logits = logits.masked_fill(disallowed, float("-inf"))
    total = logits.logsumexp(-1)
    log_prob = logits[edge_head, edge_token] - total.index_select(0, edge_head)
    if not with_entropy:
        return log_prob, log_prob.new_zeros(0)
    with torch.set_grad_enabled(entropy_trains and torch.is_grad_enabled()):
        probability = (logits - total[:, None]).exp()
        if disallowed is not None:
            # A disallowed token has probability 0, and 0 times -inf is not 0.
            logits = logits.masked_fill(disallowed, 0.0)
        entropy = total - (probability * logits).sum(-1)
        entropy = entropy.index_select(0, edge_head)
    return log_prob, entropy


def _apply_logit_transforms(config: Any, logits: Tensor) -> Tensor:
    """Apply the scaling and the soft-capping that the model's config defines, and return the
    changed logits. Some models apply these transforms after the LM head. A model with any other
    transform fails the attention check at start-up."""
    if divisor := getattr(config, "logits_scaling", None):
        logits = logits / divisor
    if (factor := getattr(config, "logit_scale", None)) is not None:
        logits = logits * factor
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


class HeadTokenSets:
    """The sets of tokens that could be sampled at some heads, as masks of the logits. A head is a
    node that predicts tokens.

    If a constraint (grammar, allowed ids, top-p …) limits a token to a set, probabilities are
    normalized over this set. A mask is as large as the logits. Therefore the sets stay packed
    (compressed) until the logits of their heads are computed. If the backward pass computes the
    logits again, it also unpacks the sets again.
    """

    def __init__(self, sets: Sequence[bytes], head_set: Sequence[int]) -> None:
        """Create the masks of some heads (nodes that predict tokens). `sets` has packed sets of
        token ids. `head_set` has one number for each head: the index of its set in `sets`, or -1 if
        all tokens are allowed."""
        self._rows = [row for row, index in enumerate(head_set) if index >= 0] if sets else []
        used = sorted({head_set[row] for row in self._rows})
        position = {index: position for position, index in enumerate(used)}
        self._sets = [sets[index] for index in used]
        self._set_of_row = [position[head_set[row]] for row in self._rows]

    def disallowed(self, logits: Tensor) -> Tensor | None:
        """Return a boolean mask of the shape [heads, vocabulary], on the device of `logits`. A head
        is a node that predicts tokens. The mask is True for each token that was not allowed at its
        head. Return None if all heads allow the whole vocabulary."""
        if not self._rows:
            return None
        allowed = _unpack_sets(self._sets, logits.shape[-1]).to(logits.device)
        disallowed = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        disallowed[self._rows] = ~allowed[self._set_of_row]
        return disallowed


def _unpack_sets(sets: Sequence[bytes], vocabulary: int) -> Tensor:
    """Unpack sets of token ids into a boolean mask [sets, vocabulary]. The mask is True for the
    members of each set."""
    width = -(-vocabulary // 8)
    bits = b"".join(unpacked(packed)[:width].ljust(width, b"\0") for packed in sets)
    rows = numpy.frombuffer(bits, dtype=numpy.uint8).reshape(len(sets), width)
    return torch.from_numpy(
        numpy.unpackbits(rows, axis=1, count=vocabulary, bitorder="little")
    ).bool()
