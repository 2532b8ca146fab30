"""Masks of the logits outside the sets that tokens were chosen from.

A token sampled under a constraint (grammar, allowed ids, top-p …) has probability only over its
set. Sets stay packed until their heads are computed, because a mask is as large as the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from fakevllm_server.types.token_masks import unpacked


class HeadTokenSets:
    """The allowed token sets of some heads.

    The sets are unpacked on use, and again when the heads are recomputed in the backward pass."""

    def __init__(self, sets: Sequence[bytes], head_set: Sequence[int]) -> None:
        """`head_set` has the index of each head's set, or -1 for the whole vocabulary."""
        numbered = enumerate(head_set) if sets else ()
        self._rows = [row for row, number in numbered if number >= 0]
        used = sorted({head_set[row] for row in self._rows})
        places = {number: place for place, number in enumerate(used)}
        self._sets = [sets[number] for number in used]
        self._set_of_row = [places[head_set[row]] for row in self._rows]

    def disallowed(self, logits: Tensor) -> Tensor | None:
        """Return a mask [heads, vocabulary] that is true for tokens outside the head's set, or None
        if no head has a set. `logits` gives shape and device."""
        if not self._rows:
            return None
        allowed = _unpacked(self._sets, logits.shape[-1]).to(logits.device)
        disallowed = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        disallowed[self._rows] = ~allowed[self._set_of_row]
        return disallowed


def _unpacked(sets: Sequence[bytes], vocabulary: int) -> Tensor:
    """Return [sets, vocabulary] of bool, true for the members of a set."""
    width = -(-vocabulary // 8)
    bits = b"".join(unpacked(packed)[:width].ljust(width, b"\0") for packed in sets)
    rows = numpy.frombuffer(bits, dtype=numpy.uint8).reshape(len(sets), width)
    return torch.from_numpy(
        numpy.unpackbits(rows, axis=1, count=vocabulary, bitorder="little")
    ).bool()
