"""Greedy decoding with transformers in float32: the reference for vLLM's answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR

torch.set_num_threads(1)


class Greedy:
    """A model with one set of weights."""

    def __init__(self, folder: Path) -> None:
        load: Any = AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=torch.float32).eval()

    def answer(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        """Return the next `num_tokens` greedy tokens. An end token does not stop decoding."""
        ids = list(prompt_ids)
        with torch.inference_mode():
            for _ in range(num_tokens):
                logits = self._model(torch.tensor([ids])).logits[0, -1]
                ids.append(int(logits.argmax()))
        return ids[len(prompt_ids) :]

    def is_greedy_token(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> list[bool]:
        """Return for each response token whether it is the greedy choice."""
        ids = torch.tensor([[*prompt_ids, *response_ids]])
        with torch.inference_mode():
            greedy = self._model(ids).logits[0, len(prompt_ids) - 1 : -1].argmax(-1)
        return [int(choice) == token for choice, token in zip(greedy, response_ids, strict=True)]

    def log_probs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token after the first."""
        with torch.inference_mode():
            log_probs = self._model(torch.tensor([ids])).logits[0].log_softmax(-1)
        return [float(log_probs[index, token]) for index, token in enumerate(ids[1:])]


def save_perturbed_model(folder: Path, seed: int) -> Path:
    """Save the demo model with random changes of its weights, and return the folder."""
    load: Any = AutoModelForCausalLM.from_pretrained
    model = load(DEMO_MODEL_DIR, dtype=torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3 * parameter.std().nan_to_num())
    model.save_pretrained(folder)
    return folder
