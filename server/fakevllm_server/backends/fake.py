"""A deterministic engine without torch: one real parameter, exact log-probabilities, a true policy
gradient.

The policy says yes or no to any prompt: P(yes) = sigmoid(theta / temperature). Only the first
token is a choice;
what follows is settled by it. Training moves theta by REINFORCE, so a reward for "yes" makes the
mean reward rise.
The same seed and the same order of requests give the same answers.

For tests, the last user message may steer one answer: `[[say TEXT]]` answers TEXT, `[[slow
SECONDS]]` waits before
each token, `[[crash]]` ends the process.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import math
import os
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import orjson

from fakevllm_adapters.chat import text_of
from fakevllm_adapters.swarm import TrainJob
from fakevllm_adapters.vllm_chat import ChatRequest
from fakevllm_server.backends.base import Batch, LossSpec, Sampling, StepMetrics, Token
from fakevllm_server.backends.door import serve

BYTES = 256
EOS, TURN = 256, 257
MAX_MODEL_LEN = 131072
START_THETA = -1.0
MAX_ODDS = 700.0
"""exp() of more overflows."""

_DIRECTIVE = re.compile(r"\[\[(say|slow|crash)\s*(.*?)\]\]", re.DOTALL)


class FakeEngine:
    """TokenEngine and TrainEngine over one number."""

    def __init__(
        self, model_name: str = "fake", seed: int = 0, max_model_len: int = MAX_MODEL_LEN
    ) -> None:
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.default_sampling: dict[str, Any] = {}
        self.eos_ids = frozenset({EOS})
        self._seed = seed
        self._asked: Counter[bytes] = Counter()
        self._sampler_theta = self._theta = START_THETA
        self._version = 0
        self._lr = 0.0

    # --- TokenEngine

    def render(self, request: ChatRequest) -> list[int]:
        ids: list[int] = []
        for message in request.messages:
            said = text_of(message.get("content")) + orjson.dumps(
                message.get("tool_calls", "")
            ).decode().strip('"')
            ids += [TURN, *f"{message.get('role')}\n{said}\n".encode()]
        return [*ids, TURN, *b"assistant\n"]

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        directives = dict(_DIRECTIVE.findall(_last_user_text(self.decode(prompt_ids))))
        if "crash" in directives:
            os._exit(70)
        tokens = self._sample(prompt_ids, sampling, directives.get("say"))[: sampling.max_tokens]
        delay = float(directives.get("slow", 0))
        if not (sampling.live or delay):
            yield tokens
            return
        for token in tokens:
            await asyncio.sleep(delay)
            yield [token]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        special = (
            {EOS: b"", TURN: b""} if skip_special_tokens else {EOS: b"<|end|>", TURN: b"<|turn|>"}
        )
        return b"".join(special[id] if id >= BYTES else bytes([id]) for id in ids).decode(
            errors="replace"
        )

    def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, said: str | None
    ) -> list[Token]:
        p = _p_yes(self._sampler_theta, sampling.temperature)
        yes = self._random(prompt_ids, sampling.seed).random() < p
        word, probability = ("yes", p) if yes else ("no", 1 - p)
        text, logprob = (
            (f"{word}.", math.log(max(probability, 1e-30))) if said is None else (said, 0.0)
        )
        ids = [*text.encode(), EOS]
        logprobs = [logprob] + [0.0] * (len(ids) - 1)
        shown = min(sampling.top_logprobs, 1)
        return [
            Token(id, logprob, self._version, [(id, logprob)] * shown)
            for id, logprob in zip(ids, logprobs, strict=True)
        ]

    def _random(self, prompt_ids: Sequence[int], seed: int | None) -> random.Random:
        """Repeats of a prompt differ, unless the request brings a seed."""
        digest = hashlib.sha256(repr(list(prompt_ids)).encode()).digest()
        self._asked[digest] += 1
        turn = self._asked[digest] if seed is None else f"seed {seed}"
        return random.Random(f"{self._seed} {digest.hex()} {turn}")

    # --- TrainEngine

    async def boot(self, job: TrainJob) -> None:
        self._lr = job.lr

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        gradient = sum(call.advantage * self._slope(call) for call in batch.calls)
        self._theta += self._lr * gradient / max(len(batch.calls), 1)
        return {
            "theta": self._theta,
            "tokens": float(sum(len(call.response_ids) for call in batch.calls)),
        }

    def _slope(self, call: Any) -> float:
        """d log p(answer) / d theta."""
        p = _p_yes(self._theta, call.temperature)
        return (1 - p) if call.response_ids[0] == ord("y") else -p

    async def publish(self, version: int) -> None:
        self._sampler_theta, self._version = self._theta, version

    async def load_weights(self, folder: Path, version: int) -> None:
        self._sampler_theta, self._version = _load(folder), version

    async def export(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "theta.json").write_bytes(orjson.dumps({"theta": self._theta}))

    async def save(self, folder: Path) -> None:
        await self.export(folder)

    async def restore(self, folder: Path) -> None:
        self._theta = _load(folder)


def _load(folder: Path) -> float:
    return orjson.loads((folder / "theta.json").read_bytes())["theta"]


def _p_yes(theta: float, temperature: float) -> float:
    if temperature == 0:
        return float(theta > 0)
    odds = theta / temperature
    return 1 / (1 + math.exp(-min(max(odds, -MAX_ODDS), MAX_ODDS)))


def _last_user_text(prompt: str) -> str:
    return prompt.rpartition("user\n")[2]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fakevllm_server.backends.fake")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--served-model-name", default="fake")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--allow-hub", action="store_true")
    parser.add_argument("--train-only", action="store_true")
    args = parser.parse_args()
    engine = FakeEngine(args.served_model_name, args.seed, args.max_model_len)
    serve(None if args.train_only else engine, engine, args.socket, on_close=lambda: None)


if __name__ == "__main__":
    main()
