"""The fidelity check covers the allowed token sets, and which tokens were forced."""

from __future__ import annotations

from dataclasses import replace

import torch
from swarm_server.backends.torch_forest.test_fidelity import SIBLINGS, fidelity_of, piece_of

from fakevllm_server.backends.torch_forest.fidelity import Fidelity, check_fidelity
from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.forest import CallTokens, build_forest
from fakevllm_server.types.token_masks import TokenMasks, packed


def test_a_token_must_have_its_recorded_set() -> None:
    few, fewer, one = (packed(bytes([bits])) for bits in (0b1110000, 0b1010000, 0b10000))
    held = replace(SIBLINGS[1], allowed=TokenMasks.from_packed_sets([few, None, few]))
    assert fidelity_of(piece_of([held]), [held]) == Fidelity(3, 3, None)

    other = replace(held, allowed=TokenMasks.from_packed_sets([few, None, fewer]))
    found = fidelity_of(piece_of([held]), [other])
    assert (found.num_true, found.fault) == (
        2,
        "call 0 (group g), response token 2, is not what was recorded",
    )
    forced = replace(held, allowed=TokenMasks.from_packed_sets([one, None, few]))
    assert fidelity_of(piece_of([forced]), [forced]) == Fidelity(2, 2, None)


def test_a_plan_that_trains_a_forced_token_is_detected() -> None:
    """Every tensor is right, but the token would wrongly count in the denominators."""
    few, one = packed(bytes([0b1110000])), packed(bytes([0b10000]))
    call = replace(SIBLINGS[1], allowed=TokenMasks.from_packed_sets([one, None, few]))
    ids, num_prompt = [*call.prompt_ids, *call.response_ids], len(call.prompt_ids)
    sets = [*[None] * num_prompt, one, None, few]
    whole = CallTokens(ids, [(num_prompt, len(ids))], temperature=1.0, allowed_sets=sets)

    found = check_fidelity(Plan.of(build_forest([whole])), [call], torch.tensor(call.logprobs))

    assert found.num_true == 0 and found.fault is not None
    assert "another number of tokens than the calls" in found.fault
