"""Demonstrations: texts to imitate or to avoid, as token ids.

In contrast to a sampled call, a demonstration has no advantage and no log-probability of a rollout
engine. Its tokens are trained with temperature 1 over the whole vocabulary, as in TRL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fakevllm_adapters.protocol.packed_numbers import pack_ids, unpack_ids

DemonstrationKind = Literal["plain", "chosen", "rejected", "desirable", "undesirable", "mismatched"]
"""`plain`: an answer to imitate, for the loss `sft`. `chosen` and `rejected`: the two answers of a
pair, for `dpo`. `desirable` and `undesirable`: a good and a bad answer, for `kto`. `mismatched`: an
answer of another group, which the trainer adds for the KL estimate of `kto`."""
KINDS: dict[str, frozenset[DemonstrationKind]] = {
    "sft": frozenset({"plain"}),
    "dpo": frozenset({"chosen", "rejected"}),
    "kto": frozenset({"desirable", "undesirable", "mismatched"}),
}
"""The kinds of demonstrations that each demonstration loss trains."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One demonstration: a prompt with a response to imitate or to avoid.

    >>> demonstration = Demonstration("g", [1, 2], [3], "chosen", pair="g")
    >>> Demonstration.from_wire(demonstration.to_wire()) == demonstration
    True
    """

    group_id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    kind: DemonstrationKind
    pair: str | None = None
    """Name of the pair of a chosen or rejected response. If several responses of one pair have the
    same kind, such as the answers of an agent's episode, their log-probabilities are added up."""

    def to_wire(self) -> dict[str, Any]:
        """Return the demonstration as a JSON object, which `from_wire` parses."""
        return {
            "group_id": self.group_id,
            "prompt_ids": pack_ids(self.prompt_ids),
            "response_ids": pack_ids(self.response_ids),
            "kind": self.kind,
            "pair": self.pair,
        }

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> Demonstration:
        """Return the demonstration from the JSON object that `to_wire` returns."""
        return Demonstration(
            wire["group_id"],
            unpack_ids(wire["prompt_ids"]),
            unpack_ids(wire["response_ids"]),
            wire["kind"],
            wire["pair"],
        )
