"""A deterministic engine without torch. The engine has one trainable number, theta, and exact
log-probabilities.

The policy answers "yes." or "no." to any prompt, with P(yes) = sigmoid(theta / temperature). Only
the first token is sampled. The first token determines all other tokens, which have probability 1.
Training updates theta by REINFORCE, so rewards for "yes" make "yes" more likely. The same seed with
the same order of requests gives the same answers.

A user message may contain a script: directives that determine the answer (see `script.py`). A
forced tool, a JSON schema or a choice may constrain the answer. The answer is then the value from
the script that fits the constraint. Without such a value, the answer is the minimal value that the
constraint allows. The repetition penalty and logit_bias act on the first token as they would act on
a model's logits.
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
from contextlib import asynccontextmanager
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import orjson

from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.errors import bad_request, not_supported
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest, prompt_too_large
from fakevllm_adapters.vllm_compat.grammar import Grammar
from fakevllm_adapters.vllm_compat.message_content import content_text
from fakevllm_server.backends.fake.byte_tokens import EOS, TOOL_CALL, TURN, decode
from fakevllm_server.backends.fake.minimal_json_value import minimal_value
from fakevllm_server.backends.fake.script import Script, Turn, read_script
from fakevllm_server.backends.http.engine_server import serve
from fakevllm_server.backends.http.policies import PolicyNames, PolicyView
from fakevllm_server.types.backend import (
    BackendRefused,
    Batch,
    Call,
    LossSpec,
    PolicyName,
    StepMetrics,
    TokenEngine,
)
from fakevllm_server.types.known_prompt import KNOWN_PROMPT, MAX_TOKENS, ProbeReply
from fakevllm_server.types.sampling import Sampling, Token

MAX_MODEL_LEN = 131072
START_THETA = -1.0
MAX_LOGIT = 700.0
"""Largest absolute logit. math.exp of a larger value overflows."""
MIN_PROBABILITY = 1e-30
"""Lower bound of a probability before its logarithm is taken, so that the logarithm is finite."""


class FakeEngine:
    """The fake engine, which has the number theta as its only weight. The class implements the
    interfaces TokenEngine (sampling) and TrainEngine (training)."""

    def __init__(
        self,
        model_name: str = "fake",
        seed: int = 0,
        max_model_len: int = MAX_MODEL_LEN,
        *,
        token_delay_s: float = 0.0,
        max_num_seqs: int | None = None,
    ) -> None:
        """Create the engine. `token_delay_s` is the number of seconds that each token takes, and
        `max_num_seqs` is the maximum number of answers that are sampled at the same time. Both make
        the engine as slow as a real one, for measurements."""
        self._token_delay_s = token_delay_s
        self._slots = None if max_num_seqs is None else asyncio.Semaphore(max_num_seqs)
        self._num_waiting = 0
        self.model_name = model_name
        self.max_model_len = max_model_len
        self.max_prompt_bytes = max_model_len  # a token is a byte
        self.default_sampling: dict[str, Any] = {}
        self.eos_ids = frozenset({EOS})
        self.reports_allowed = False
        self._seed = seed
        self._num_requests: Counter[bytes] = Counter()
        """Number of requests so far for each prompt. The keys are digests of the prompts."""
        self._sampler_theta = self._theta = START_THETA
        self._version = 0
        self.names = PolicyNames(model_name)
        self._policies: dict[str, tuple[float, int]] = {}
        """Theta and version of each further policy (weights beside the trained ones), by policy
        name."""
        self._lr = 0.0

    # --- TokenEngine

    def render(self, request: ChatRequest) -> list[int]:
        texts = [
            content_text(message.get("content"), self.model_name) for message in request.messages
        ]
        num_bytes = sum(len(text.encode(errors="replace")) for text in texts)
        if num_bytes > self.max_prompt_bytes and request.truncate_prompt_tokens is None:
            raise prompt_too_large(num_bytes, self.max_model_len, self.max_prompt_bytes)
        ids: list[int] = []
        for message, text in zip(request.messages, texts, strict=True):
            ids += [TURN, *f"{message.get('role')}\n{text}".encode(errors="replace")]
            if message.get("tool_calls"):
                ids += [TOOL_CALL, *orjson.dumps(message["tool_calls"])]
            ids += b"\n"
        if request.continue_final_message:
            return ids[:-1]
        return [*ids, TURN, *b"assistant\n"] if request.add_generation_prompt else ids

    def check(self, sampling: Sampling) -> None:
        for name, is_set in (
            ("allowed_token_ids", sampling.allowed_ids is not None),
            ("bad_words", sampling.bad_words),
            ("min_tokens", sampling.min_tokens),
        ):
            if is_set:
                raise not_supported(name)
        if sampling.grammar is not None:
            _constrained_text(sampling.grammar, Script())

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        return self._generate(prompt_ids, sampling, (self._sampler_theta, self._version))

    async def _generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, weights: tuple[float, int]
    ) -> AsyncGenerator[list[Token]]:
        """Sample an answer. `weights` is the pair of theta (the only parameter of the fake model)
        and the version of the weights."""
        self.check(sampling)
        script = read_script(_turns(prompt_ids))
        if script.crashes:
            os._exit(70)
        text = script.text
        if sampling.grammar is not None:
            text = _constrained_text(sampling.grammar, script)
        tokens = self._sample(prompt_ids, sampling, text, weights)[: sampling.max_tokens]
        delay_s = script.delay_s or self._token_delay_s
        if not (sampling.live or delay_s):
            yield tokens
            return
        async with self._slot():
            for token in tokens:
                await asyncio.sleep(delay_s)
                yield [token]

    @asynccontextmanager
    async def _slot(self) -> AsyncGenerator[None]:
        """Wait until fewer answers than the maximum are sampled. Then occupy one slot."""
        if self._slots is None:
            yield
            return
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._slots.release()

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return decode(ids, skip_special_tokens=skip_special_tokens)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode(errors="replace"))

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        return [self.decode([id], skip_special_tokens=False) for id in ids]

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def _sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        text: str | None,
        weights: tuple[float, int],
    ) -> list[Token]:
        """Return the tokens of the answer with their log-probabilities. If `text` is None, sample
        the answer "yes." or "no.". Otherwise the answer is `text`, in which each token has
        probability 1."""
        sampler_theta, version = weights
        theta = _biased_logit(sampler_theta, sampling, prompt_ids)
        p = _p_yes(theta, sampling.temperature)
        yes = self._random(prompt_ids, sampling.seed).random() < p
        logprob = 0.0
        if text is None:
            text, probability = ("yes.", p) if yes else ("no.", 1 - p)
            logprob = math.log(max(probability, MIN_PROBABILITY))
        ids = [*text.encode(errors="replace"), EOS]
        stop = next((at for at, id in enumerate(ids) if id in sampling.stop_ids), len(ids))
        ids = ids[: stop + 1]
        logprobs = [logprob] + [0.0] * (len(ids) - 1)
        num_top = min(sampling.top_logprobs, 1)
        return [
            Token(id, logprob, version, [(id, logprob)] * num_top)
            for id, logprob in zip(ids, logprobs, strict=True)
        ]

    def _random(self, prompt_ids: Sequence[int], seed: int | None) -> random.Random:
        """Return the random number generator of one request. Requests with the same prompt and the
        same seed get equal random numbers. Requests with the same prompt and no seed get different
        random numbers."""
        digest = hashlib.sha256(repr(list(prompt_ids)).encode()).digest()
        self._num_requests[digest] += 1
        variant = self._num_requests[digest] if seed is None else f"seed {seed}"
        return random.Random(f"{self._seed} {digest.hex()} {variant}")

    async def probe(self) -> ProbeReply:
        ids = self.encode(KNOWN_PROMPT, add_special_tokens=False)[:MAX_TOKENS]
        call = Call("", ids[:1], ids[1:], [], self._version, 1.0, advantage=0.0, weight=1.0)
        return ProbeReply(ids, _log_probs(self._sampler_theta, call), "float32", 1)

    # --- PolicyEngine

    async def load_policy(self, name: str, folder: Path, version: int) -> None:
        if self.names.check(name, version):
            self._policies[name] = _load(folder), version
            self.names.add(name, version)

    async def unload_policy(self, name: str) -> None:
        self._policies.pop(name, None)
        self.names.remove(name)

    def policy(self, name: str) -> TokenEngine | None:
        weights = self._policies.get(name)
        if weights is None:
            return None
        return PolicyView(self, name, partial(self._generate, weights=weights))

    # --- TrainEngine

    async def boot(self, job: TrainJob) -> None:
        self._lr = job.lr

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        gradient = sum(call.advantages[0] * self._gradient(call) for call in batch.calls)
        self._theta += self._lr * gradient / max(len(batch.calls), 1)
        return {
            "theta": self._theta,
            "tokens": float(sum(len(call.response_ids) for call in batch.calls)),
        }

    def _gradient(self, call: Call) -> float:
        """Return the derivative of the answer's log-probability with respect to the logit. The
        logit is theta / temperature."""
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

    async def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        raise BackendRefused("the fake engine trains no adapters")

    async def save(self, folder: Path) -> None:
        await self.export(folder)

    async def restore(self, folder: Path) -> None:
        self._theta = _load(folder)


def _log_probs(theta: float, call: Call) -> list[float]:
    """Return the log-probabilities of the answer's trained tokens. After the first token, each
    token has probability 1, so its log-probability is 0."""
    p = _p_yes(theta, call.temperature)
    first = p if call.response_ids[0] == ord("y") else 1 - p
    logprobs = [math.log(max(first, MIN_PROBABILITY))] + [0.0] * (len(call.response_ids) - 1)
    return list(compress(logprobs, call.is_trained))


def _load(folder: Path) -> float:
    return orjson.loads((folder / "theta.json").read_bytes())["theta"]


def _p_yes(theta: float, temperature: float) -> float:
    if temperature == 0:
        return float(theta > 0)
    logit = theta / temperature
    return 1 / (1 + math.exp(-min(max(logit, -MAX_LOGIT), MAX_LOGIT)))


def _biased_logit(theta: float, sampling: Sampling, prompt_ids: Sequence[int]) -> float:
    """Return the logit of "yes" minus the logit of "no", after logit_bias and repetition_penalty.

    Frequency and presence penalties have no effect on the first token, because they count only
    sampled tokens.
    """
    logits = {ord("y"): theta, ord("n"): 0.0}
    for id in logits:
        logits[id] += sampling.logit_bias.get(id, 0.0)
        if id in prompt_ids:
            repetition = sampling.repetition_penalty
            logits[id] *= 1 / repetition if logits[id] > 0 else repetition
    return logits[ord("y")] - logits[ord("n")]


def _constrained_text(grammar: Grammar, script: Script) -> str:
    """Return the text of an answer that a grammar constrains. If the script (the directives in the
    user message) has a value of the needed kind, return this value. Otherwise return the minimal
    value that the grammar allows. For a choice, the scripted answer is used only if it is one of
    the alternatives. JSON values of the script are not checked against the schema.

    Raises WireError (400) for a grammar that the fake engine does not support.
    """
    if grammar.kind in ("regex", "ebnf", "structural_tag"):
        raise not_supported(f"structured_outputs.{grammar.kind}")
    if grammar.kind == "arguments" and script.calls:
        return _json(script.calls[0].arguments)
    if grammar.kind == "calls" and script.calls:
        return _json([{"name": name, "parameters": value} for name, value in script.calls])
    schema = orjson.loads(grammar.text)
    if grammar.kind == "choice":
        return next((each for each in schema if each == script.answer), schema[0])
    if grammar.kind == "json" and script.answer is not None and _is_json(script.answer):
        return script.answer
    try:
        return _json(minimal_value(schema))
    # Translated: a schema may be any JSON, so its keywords may have values of any type.
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
    """Return the messages of a rendered prompt, without the assistant message at the end that the
    answer will continue. A prompt of /v1/completions has no messages, so the whole prompt is
    returned as one user message."""
    if TURN not in prompt_ids:
        return [Turn("user", _text(prompt_ids), False)]
    ids = list(prompt_ids)
    starts = [at for at, id in enumerate(ids) if id == TURN]
    turns: list[Turn] = []
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        message = ids[start + 1 : end]
        role, _, text = _text(message).partition("\n")
        turns.append(Turn(role, text, TOOL_CALL in message))
    return turns[:-1] if turns[-1].role == "assistant" else turns


def _text(ids: Sequence[int]) -> str:
    return decode(ids, skip_special_tokens=True)


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
    parser.add_argument("--token-delay-s", type=float, default=0.0, help="seconds of each token")
    parser.add_argument(
        "--max-num-seqs", type=int, help="answers that are sampled at the same time"
    )
    args = parser.parse_args()
    engine = FakeEngine(
        args.served_model_name,
        args.seed,
        args.max_model_len,
        token_delay_s=args.token_delay_s,
        max_num_seqs=args.max_num_seqs,
    )
    samples = not args.train_only
    serve(
        engine if samples else None,
        engine,
        args.socket,
        policies=engine if samples else None,
        on_close=lambda: None,
    )


if __name__ == "__main__":
    main()
