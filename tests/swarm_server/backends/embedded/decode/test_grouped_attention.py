from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from swarm_server.backends.embedded.engine_helpers import load
from transformers import GPT2Config, GPT2LMHeadModel

from fakevllm_server.backends.embedded.decode.grouped_attention import use_grouped_attention


@torch.inference_mode()
def test_grouped_attention_gives_the_same_logits_with_and_without_a_mask(tiny_folder: Path) -> None:
    plain: Any = load(tiny_folder)
    grouped: Any = load(tiny_folder)
    use_grouped_attention(grouped)
    assert grouped.config._attn_implementation != plain.config._attn_implementation
    ids = torch.randint(7, 512, (3, 20), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0

    for arguments in ({}, {"attention_mask": mask}):
        logits = [model(input_ids=ids, **arguments).logits for model in (plain, grouped)]
        visible = slice(5, None) if arguments else slice(None)
        torch.testing.assert_close(
            logits[1][:, visible], logits[0][:, visible], atol=1e-5, rtol=1e-5
        )


def test_a_model_without_torchs_attention_keeps_its_own() -> None:
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4))
    model.set_attn_implementation("eager")

    use_grouped_attention(model)

    assert model.config._attn_implementation == "eager"
