"""Divide the calls of a batch among the workers, with or without shared prefixes.

Without shared prefixes, each call is a row of its own, and verl forms the micro-batches. With
shared prefixes, this module forms the micro-batches. A *piece* is a set of calls that go through
the model together. Its forest has one node for each distinct prefix of its calls. Each micro-batch
is one piece.

FSDP2's workers compute a layer together. Therefore each worker needs the same number of pieces, and
a round (the pieces that the workers compute at the same time) takes as long as its largest piece.
verl also needs the same number of rows in each piece. Padding rows with weight 0 fill the gaps.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fakevllm_server.backends.torch_forest.attention.registry import MIN_RHO, ROWS
from fakevllm_server.backends.torch_forest.prefix_sharing import unshare_small_prefixes
from fakevllm_server.backends.verl.batch_split import (
    PADDING,
    num_tokens,
    split_among_workers,
    trainable_calls,
)
from fakevllm_server.forest import CallTokens, Piece, build_forest, pack
from fakevllm_server.types.backend import Call, StepMetrics

PADDING_ROOT = -1
"""Root key of a padding row."""
SLACKS = (1.0, 1.2, 1.5)
"""Sizes of pieces to try, relative to a perfectly even division without any repeated prefix."""


@dataclass(frozen=True, slots=True)
class ForestLayout:
    """What the workers need to know to compute the rows of a batch with shared prefixes."""

    attention: str
    """Name of the attention method, which is a key of `torch_forest.ATTENTIONS`."""
    roots: Sequence[int]
    """Root key of each row. Only rows with equal root keys share tokens. A padding row has
    PADDING_ROOT."""
    rows_per_piece: int
    """Number of rows of each piece. The rows of a piece follow each other."""


@dataclass(frozen=True, slots=True)
class WorkerRows:
    """The calls of a batch as rows, those of the first worker first. Each worker has the same
    number of rows."""

    rows: Sequence[Call]
    forest: ForestLayout | None
    """None if each row is computed on its own."""
    metrics: StepMetrics
    """The metrics of prefix sharing, with the names and the meaning of the embedded trainer."""

    @staticmethod
    def of(calls: Sequence[Call], num_workers: int, max_tokens: int, attention: str) -> WorkerRows:
        """Divide the calls of a batch among the workers. Calls without a response are left out.

        `attention` is the attention method of the workers. With `rows`, calls share no prefixes.
        If all calls together share so little that plain rows are as fast, they share no prefixes
        either. A piece has at most `max_tokens` tokens, as on the embedded trainer: if a call alone
        has more tokens, its length is added to the maximum.

        Raises BackendError for a call without a prompt or with temperature 0, because such calls
        cannot be trained.
        """
        trained = trainable_calls(calls)
        longest = max(map(num_tokens, trained), default=0)
        if longest > max_tokens:
            max_tokens += longest
        if attention == ROWS or not trained:
            return _without_sharing(trained, num_workers)
        tokens = unshare_small_prefixes([_tokens_of(call) for call in trained])
        rounds = divide_into_rounds(tokens, max_tokens, num_workers)
        pieces = [piece for pieces in rounds for piece in pieces]
        num_computed = sum(piece.forest.num_nodes for piece in pieces)
        if sum(map(num_tokens, trained)) < MIN_RHO * num_computed:
            return _without_sharing(trained, num_workers)
        return _with_sharing(trained, tokens, rounds, num_workers, attention)


def divide_into_rounds(
    calls: Sequence[CallTokens], max_tokens: int, num_workers: int
) -> list[list[Piece]]:
    """Divide calls into pieces (sets of calls that go through the model together), and return the
    pieces of each round. A round has one piece for each worker. In the last round, pieces of the
    last workers may be missing.

    More pieces let more workers compute at the same time, but prefixes that calls of several pieces
    share are computed several times. The division with the least computing time is chosen. The time
    of a round is the number of nodes of its largest piece.

    >>> calls = [CallTokens.of([1, 2], [answer]) for answer in (3, 4, 5, 6)]
    >>> [[piece.calls for piece in pieces] for pieces in divide_into_rounds(calls, 100, 2)]
    [[[0, 1], [2, 3]]]
    """
    num_nodes = build_forest(calls).num_nodes
    num_rounds = math.ceil(num_nodes / (num_workers * max_tokens))
    even = num_nodes / (num_workers * max(num_rounds, 1))
    budgets = {max_tokens, *(min(max_tokens, math.ceil(slack * even)) for slack in SLACKS)}
    divisions = [pack(calls, budget) for budget in sorted(budgets, reverse=True)]
    pieces = min(divisions, key=lambda pieces: _time(pieces, num_workers))
    return [pieces[first : first + num_workers] for first in range(0, len(pieces), num_workers)]


def _time(pieces: Sequence[Piece], num_workers: int) -> int:
    """Return the sum of the sizes of the largest pieces of all rounds. `pieces` is sorted by size,
    the largest first."""
    return sum(piece.forest.num_nodes for piece in pieces[::num_workers])


def _tokens_of(call: Call) -> CallTokens:
    return CallTokens.of(call.prompt_ids, call.response_ids, temperature=call.temperature)


def _without_sharing(calls: Sequence[Call], num_workers: int) -> WorkerRows:
    num_computed = sum(map(num_tokens, calls))
    rows = split_among_workers(calls, num_workers)
    return WorkerRows(rows, None, _sharing_metrics(num_computed, num_computed))


def _with_sharing(
    calls: Sequence[Call],
    tokens: Sequence[CallTokens],
    rounds: Sequence[Sequence[Piece]],
    num_workers: int,
    attention: str,
) -> WorkerRows:
    root_numbers: dict[Hashable, int] = {}
    roots = [root_numbers.setdefault(one.root, len(root_numbers)) for one in tokens]
    pieces = [piece for pieces in rounds for piece in pieces]
    rows_per_piece = max(len(piece.calls) for piece in pieces)
    rows: list[Call] = []
    row_roots: list[int] = []
    for worker in range(num_workers):
        for of_workers in rounds:
            chosen = of_workers[worker].calls if worker < len(of_workers) else []
            num_padding = rows_per_piece - len(chosen)
            rows += [*(calls[index] for index in chosen), *[PADDING] * num_padding]
            row_roots += [*(roots[index] for index in chosen), *[PADDING_ROOT] * num_padding]
    num_computed = sum(piece.forest.num_nodes for piece in pieces)
    return WorkerRows(
        rows,
        ForestLayout(attention, row_roots, rows_per_piece),
        _sharing_metrics(sum(map(num_tokens, calls)), num_computed),
    )


def _sharing_metrics(num_naive: int, num_computed: int) -> StepMetrics:
    return {
        "tokens_computed": float(num_computed),
        "tokens_saved": float(num_naive - num_computed),
        "rho": num_naive / num_computed if num_computed else 1.0,
    }


def joined_sharing_metrics(parts: Sequence[WorkerRows]) -> StepMetrics:
    """Return the metrics of prefix sharing of a step from those of its mini-batches."""
    num_computed = sum(int(part.metrics["tokens_computed"]) for part in parts)
    num_saved = sum(int(part.metrics["tokens_saved"]) for part in parts)
    return _sharing_metrics(num_computed + num_saved, num_computed)
