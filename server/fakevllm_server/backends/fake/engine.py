"""A deterministic engine without torch: one real parameter, exact log-probabilities, a true policy
gradient.

The policy says yes or no to any prompt: P(yes) = sigmoid(theta / temperature). Only the first
token is a choice;
what follows is settled by it. Training moves theta by REINFORCE, so a reward for "yes" makes the
mean reward rise.
The same seed and the same order of requests give the same answers.

A user message may steer answers: see `fake_script`. Under a forced tool, a JSON schema or a choice
it answers what the script says where that fits, else the smallest value. Penalties and logit_bias
bend its one choice as they would bend a model's; every other token is certain, and stays so.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from itertools import compress
from pathlib import Path
from typing import Any

import orjson

from fakevllm_adapters.formats.chat import text_of
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.errors import bad_request, not_supported
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_adapters.vllm_compat.grammar import Grammar
from fakevllm_server.backends.fake.schema_min import smallest
from fakevllm_server.backends.fake.script import Script, Turn, script_of
from fakevllm_server.backends.http.engine_server import serve
from fakevllm_server.types.backend import Batch, Call, LossSpec, PolicyName, StepMetrics
from fakevllm_server.types.sampling import Sampling, Token

BYTES = 256
EOS, TURN, CALLED = 256, 257, 258
MAX_MODEL_LEN = 131072
START_THETA = -1.0
MAX_ODDS = 700.0
"""exp() of more overflows."""
LEAST = 1e-30
"""A probability that has a logarithm."""


class FakeEngine:
    """TokenEngine and TrainEngine over one number."""

    def __init__(
        self, model_name: str = "fake", seed: int = 0, max_model_len: int = MAX_MODEL_LEN
    ) -> None:
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.default_sampling: dict[str, Any] = {}
        self.eos_ids = frozenset({EOS})
        self.reports_allowed = False
        self._seed = seed
        self._asked: Counter[bytes] = Counter()
        self._sampler_theta = self._theta = START_THETA
        self._version = 0
        self._lr = 0.0

    # --- TokenEngine

    def render(self, request: ChatRequest) -> list[int]:
        ids: list[int] = []
        for message in request.messages:
            said = text_of(message.get("content"))
            ids += [TURN, *f"{message.get('role')}\n{said}".encode(errors="replace")]
            if message.get("tool_calls"):
                ids += [CALLED, *orjson.dumps(message["tool_calls"])]
            ids += b"\n"
        if request.continue_final_message:
            return ids[:-1]
        return [*ids, TURN, *b"assistant\n"] if request.add_generation_prompt else ids

    def check(self, sampling: Sampling) -> None:
        for name, asked in (
            ("allowed_token_ids", sampling.allowed_ids is not None),
            ("bad_words", sampling.bad_words),
            ("min_tokens", sampling.min_tokens),
        ):
            if asked:
                raise not_supported(name)
        if sampling.grammar is not None:
            _held_text(sampling.grammar, Script())

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        self.check(sampling)
        script = script_of(_turns(prompt_ids))
        if script.crashes:
            os._exit(70)
        said = script.text
        if sampling.grammar is not None:
            said = _held_text(sampling.grammar, script)
        tokens = self._sample(prompt_ids, sampling, said)[: sampling.max_tokens]
        if not (sampling.live or script.delay_s):
            yield tokens
            return
        for token in tokens:
            await asyncio.sleep(script.delay_s)
            yield [token]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        special = (
            {EOS: b"", TURN: b""} if skip_special_tokens else {EOS: b"<|end|>", TURN: b"<|turn|>"}
        )
        return b"".join(special.get(id, b"") if id >= BYTES else bytes([id]) for id in ids).decode(
            errors="replace"
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode(errors="replace"))

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [self.decode([id], skip_special_tokens=False) for id in ids]

    @property
    def num_waiting(self) -> int:
        return 0

    def _sample(
        self, prompt_ids: Sequence[int], sampling: Sampling, said: str | None
    ) -> list[Token]:
        theta = _bent(self._sampler_theta, sampling, prompt_ids)
        p = _p_yes(theta, sampling.temperature)
        yes = self._random(prompt_ids, sampling.seed).random() < p
        word, probability = ("yes", p) if yes else ("no", 1 - p)
        text, logprob = (
            (f"{word}.", math.log(max(probability, LEAST))) if said is None else (said, 0.0)
        )
        ids = [*text.encode(errors="replace"), EOS]
        stop = next((at for at, id in enumerate(ids) if id in sampling.stop_ids), len(ids))
        ids = ids[: stop + 1]
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
        gradient = sum(call.advantages[0] * self._slope(call) for call in batch.calls)
        self._theta += self._lr * gradient / max(len(batch.calls), 1)
        return {
            "theta": self._theta,
            "tokens": float(sum(len(call.response_ids) for call in batch.calls)),
        }

    def _slope(self, call: Any) -> float:
        """d log p(answer) / d theta."""
        p = _p_yes(self._theta, call.temperature)
        return (1 - p) if call.response_ids[0] == ord("y") else -p

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        theta = START_THETA if policy == "reference" else self._theta
        return [_log_probs(theta, call) for call in calls]

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


def _log_probs(theta: float, call: Call) -> list[float]:
    """What follows the first token is certain."""
    p = _p_yes(theta, call.temperature)
    first = p if call.response_ids[0] == ord("y") else 1 - p
    found = [math.log(max(first, LEAST))] + [0.0] * (len(call.response_ids) - 1)
    return list(compress(found, call.is_trained))


def _load(folder: Path) -> float:
    return orjson.loads((folder / "theta.json").read_bytes())["theta"]


def _p_yes(theta: float, temperature: float) -> float:
    if temperature == 0:
        return float(theta > 0)
    odds = theta / temperature
    return 1 / (1 + math.exp(-min(max(odds, -MAX_ODDS), MAX_ODDS)))


def _bent(theta: float, sampling: Sampling, prompt_ids: Sequence[int]) -> float:
    """Nothing is sampled yet, so that only the prompt can be repeated."""
    logits = {ord("y"): theta, ord("n"): 0.0}
    for id in logits:
        logits[id] += sampling.logit_bias.get(id, 0.0)
        if id in prompt_ids:
            repetition = sampling.repetition_penalty
            logits[id] *= 1 / repetition if logits[id] > 0 else repetition
    return logits[ord("y")] - logits[ord("n")]


def _held_text(grammar: Grammar, script: Script) -> str:
    """Raises WireError (400)."""
    if grammar.kind in ("regex", "ebnf", "structural_tag"):
        raise not_supported(f"structured_outputs.{grammar.kind}")
    if grammar.kind == "arguments" and script.calls:
        return _json(script.calls[0].arguments)
    if grammar.kind == "calls" and script.calls:
        return _json([{"name": name, "parameters": given} for name, given in script.calls])
    schema = orjson.loads(grammar.text)
    if grammar.kind == "choice":
        return next((each for each in schema if each == script.said), schema[0])
    if grammar.kind == "json" and script.said is not None and _is_json(script.said):
        return script.said
    try:
        return _json(smallest(schema))
    # A schema may be any JSON.
    except (ValueError, TypeError, AttributeError) as error:
        raise bad_request(f"Failed to transform json schema into a grammar: {error}") from None


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _turns(prompt_ids: Sequence[int]) -> list[Turn]:
    """Up to the one to be answered. A prompt that no chat made is one turn of the user's."""
    if TURN not in prompt_ids:
        return [Turn("user", _text(prompt_ids), False)]
    ids = list(prompt_ids)
    starts = [at for at, id in enumerate(ids) if id == TURN]
    turns: list[Turn] = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        said = ids[start + 1 : end]
        role, _, text = _text(said).partition("\n")
        turns.append(Turn(role, text, CALLED in said))
    return turns[:-1] if turns[-1].role == "assistant" else turns


def _text(ids: Sequence[int]) -> str:
    return bytes(id for id in ids if id < BYTES).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m fakevllm_server.backends.fake.engine")
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
