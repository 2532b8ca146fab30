"""Pages of tokens for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fakevllm.ledger.records import GroupRecord
from fakevllm.tokens.page import Page, ledger_page
from fakevllm_adapters.protocol.packed_numbers import pack_floats, pack_ids
from fakevllm_adapters.protocol.swarm import CapturedCall
from tests.proxy.ledger.ledger_cases import group

TEXTS = {
    1: "<|user|>",
    2: "Sum?\n",
    3: " It",
    4: " is 8",
    5: "<script>alert(1)</script>",
    6: "\x1b[2J",
}


def call(
    ids: Sequence[int] = (3, 4), logprobs: Sequence[float] | None = (-0.5, 0.0), **facts: Any
) -> CapturedCall:
    return CapturedCall(
        prompt_ids=pack_ids([1, 2]),
        response_ids=pack_ids(ids),
        logprobs=None if logprobs is None else pack_floats(logprobs),
        weight_versions=[[3, 0, 1], [4, 1, 2]],
        temperature=1.0,
        finish_reason="stop",
        **facts,
    )


def trained_group(*advantages: float | None) -> GroupRecord:
    """Return a trained group with one sibling per advantage. The advantage None means that the
    sibling was not trained."""
    record = group("g1", [1.0] * len(advantages), state="trained")
    siblings = [
        replace(sibling, advantage=advantage, trained=advantage is not None)
        for sibling, advantage in zip(record.siblings, advantages, strict=True)
    ]
    return replace(record, siblings=siblings, trained_step=5, trained_version=6)


def page(*advantages: float | None, **facts: Any) -> Page:
    record = trained_group(*advantages)
    calls = {sibling.index: [call(**facts)] for sibling in record.siblings}
    return ledger_page(record, calls, None)
