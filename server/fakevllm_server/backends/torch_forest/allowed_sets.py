"""Logits over the sets their tokens were chosen from: what is outside has no probability.

Sets stay packed until the heads they are for are computed, for a mask is as large as the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from fakevllm_server.types.token_masks import unpacked


class Allowed:
    """Of some heads. Unpacked where it is used, and again where that is computed again."""

    def __init__(self, sets: Sequence[bytes], head_set: Sequence[int]) -> None:
        """`head_set`: the index of each head's set, or -1 for all of the vocabulary."""
        numbered = enumerate(head_set) if sets else ()
        self._rows = [row for row, number in numbered if number >= 0]
        used = sorted({head_set[row] for row in self._rows})
        places = {number: place for place, number in enumerate(used)}
        self._sets = [sets[number] for number in used]
        self._set_of_row = [places[head_set[row]] for row in self._rows]

    def outside(self, logits: Tensor) -> Tensor | None:
        """[heads, vocabulary], true for what a head's token could not be; None where each could be
        any."""
        if not self._rows:
            return None
        held = _unpacked(self._sets, logits.shape[-1]).to(logits.device)
        outside = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        outside[self._rows] = ~held[self._set_of_row]
        return outside


def _unpacked(sets: Sequence[bytes], vocabulary: int) -> Tensor:
    """[sets, vocabulary], true for what is in a set."""
    width = -(-vocabulary // 8)
    bits = b"".join(unpacked(one)[:width].ljust(width, b"\0") for one in sets)
    rows = numpy.frombuffer(bits, dtype=numpy.uint8).reshape(len(sets), width)
    return torch.from_numpy(
        numpy.unpackbits(rows, axis=1, count=vocabulary, bitorder="little")
    ).bool()
