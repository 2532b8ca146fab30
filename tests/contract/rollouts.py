"""A rollout engine for contract tests, with an HTTP client and the server's capture of calls."""

from __future__ import annotations

import asyncio
import importlib
import shutil
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import aiohttp
import orjson

from fakevllm_adapters.formats.sse import DONE, SseDecoder, parse_event
from fakevllm_adapters.http.answer_parts import PartDecoder
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.backends.process.engine_registry import ROLLOUTS
from fakevllm_server.backends.training.lora_settings import LoraSettings
from fakevllm_server.rollout.capture.chat_tokens import ChatCapture
from fakevllm_server.rollout.capture.shared_call import CompleteChoice, SharedCapture
from fakevllm_server.rollout.engine_client import EngineClient
from fakevllm_server.types.backend import Endpoint, Rollout
from fakevllm_server.types.calls import RecordedCall
from fakevllm_server.types.engine_spec import EngineSpec

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
MAX_ATTEMPTS = 20
"""Number of attempts to get two streams of vLLM with equal chunks.

vLLM joins tokens that its reader has not read yet, so the chunks vary by chance. A real difference
would appear in every attempt."""
TOOL: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"left": {"type": "integer"}},
            "required": ["left"],
        },
    },
}
NAMED_DIGIT: Json = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"left": {"enum": [1, 2]}},
            "required": ["left"],
            "additionalProperties": False,
        },
    },
}
CONSTRAINED: dict[str, Json] = {
    "response_format": {
        "max_tokens": 60,
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "n",
                "schema": {
                    "type": "object",
                    "properties": {"n": {"enum": [7]}},
                    "required": ["n"],
                    "additionalProperties": False,
                },
            },
        },
    },
    "tool_choice": {
        "max_tokens": 60,
        "tools": [NAMED_DIGIT],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "structured_outputs": {"structured_outputs": {"choice": ["yes", "no"]}},
    "logit_bias": {"logit_bias": {"40": -100}},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "min_tokens": {"min_tokens": 3},
    "prompt_logprobs": {"prompt_logprobs": 1},
}
"""Requests that an engine may refuse by design, by the field that the refusal names."""
MASKING_FIELDS = frozenset({"response_format", "tool_choice", "structured_outputs", "min_tokens"})
"""Fields that restrict the allowed tokens. A call with these fields is trained if the engine
reports the allowed tokens."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """Deliberate differences between engines. In all other respects, all engines must behave
    alike."""

    model: str | None
    refuses: frozenset[str] = frozenset()
    """Fields of CONSTRAINED that the engine refuses."""
    engine: str | None = None
    """Name of the engine, if it is another than the name of the rig."""
    lora_rank: int = 0
    reports_versions: bool = True
    """Whether the answer names the weight version of each token."""
    top_logprobs: int = 4
    question: str = "What is 3 plus 4?"
    endless: str = "What is 3 plus 4?"
    """A question that, with `ignore_eos`, is answered for as long as a test waits."""
    stop: tuple[str, str, str] = ("What is 3 plus 4?", " ", "")
    """A question, a stop string in its greedy answer, and the text before the stop string.

    "" stands for any text."""


ABILITIES: dict[str, Abilities] = {
    "fake": Abilities(
        model=None,
        refuses=frozenset({"min_tokens", "prompt_logprobs"}),
        top_logprobs=1,
        endless=f"[[say {'a' * 200}]] [[slow 0.05]]",
        stop=("[[say one END two]]", "END", "one "),
    ),
    "embedded": Abilities(model=str(DEMO_MODEL_DIR), refuses=frozenset({"prompt_logprobs"})),
    "vllm": Abilities(model=str(DEMO_MODEL_DIR), reports_versions=False),
    "vllm_lora": Abilities(
        model=str(DEMO_MODEL_DIR), reports_versions=False, engine="vllm", lora_rank=8
    ),
}


class Answer(NamedTuple):
    status: int
    json: Json


class CapturedAnswer(NamedTuple):
    status: int
    body: bytes
    call: RecordedCall | None

    @property
    def record(self) -> RecordedCall:
        assert self.call is not None, self.body
        return self.call


@dataclass
class Rig:
    """A running engine. `folders` has two folders of weights: those with which the engine was
    started, and other weights."""

    name: str
    rollout: Rollout
    endpoint: Endpoint
    client: EngineClient
    http: aiohttp.ClientSession
    folders: list[Path]

    @property
    def abilities(self) -> Abilities:
        return ABILITIES[self.name]

    @property
    def is_vllm(self) -> bool:
        return self.name.startswith("vllm")

    async def send(self, body: Json) -> Answer:
        if self.endpoint.gate.adapter is not None:
            sent = await self._relay(self.body(body))
            return Answer(sent.status, orjson.loads(sent.body))
        async with self.http.post(CHAT, json=self.body(body)) as answer:
            return Answer(answer.status, await answer.json())

    async def stream(self, body: Json) -> list[Json]:
        """Send a streaming request, check the stream's end, and return its chunks."""
        if self.endpoint.gate.adapter is not None:
            sent = await self._relay(self.body(body | {"stream": True}))
            assert sent.status == 200 and b"text/event-stream" in sent.headers[b"content-type"]
            return chunks_of(sent.body)
        async with self.http.post(CHAT, json=self.body(body | {"stream": True})) as answer:
            assert answer.status == 200 and answer.content_type == "text/event-stream"
            return chunks_of(await answer.read())

    async def _relay(self, body: Json) -> SentAnswer:
        """Send a request in the way in which the server relays it. This way selects the adapter."""
        sent = SentAnswer()
        headers = {"Content-Type": "application/json"}
        await self.client.relay("POST", CHAT, orjson.dumps(body), headers, sent)
        return sent

    async def capture(self, body: Json, sent: SentAnswer | None = None) -> CapturedAnswer:
        """Send a request as the server does, through the weight gate and with a capture. `sent`
        shows how far the answer is."""
        sent = sent or SentAnswer()
        records: list[RecordedCall | None] = []

        async def finished() -> None:
            records.append(capture.record(stamp))

        async with self.endpoint.gate.call() as stamp:
            capture = ChatCapture(
                self.body(body),
                self.endpoint.default_sampling,
                self.endpoint.refusal,
                reports_allowed=self.endpoint.reports_allowed,
            )
            await self.client.capture(
                CHAT,
                capture,
                {"Content-Type": "application/json"},
                sent,
                finished,
            )
        return CapturedAnswer(sent.status, sent.body, records[0] if records else None)

    async def capture_siblings(self, body: Json, num: int) -> list[CapturedAnswer]:
        """Send a request for several siblings as the server does, and return each answer."""
        sent, records = SentAnswer(), dict[int, RecordedCall | None]()

        async def complete(choices: Sequence[CompleteChoice]) -> None:
            records.update({choice.index: choice.capture.record(stamp) for choice in choices})

        def create(body: Json) -> ChatCapture:
            endpoint = self.endpoint
            return ChatCapture(
                body,
                endpoint.default_sampling,
                endpoint.refusal,
                reports_allowed=endpoint.reports_allowed,
            )

        async with self.endpoint.gate.call() as stamp:
            shared = SharedCapture(CHAT, self.body(body), num, self.client.forms, create)
            headers = {"Content-Type": "application/json"}
            await self.client.capture_siblings(CHAT, shared, headers, 0, sent, complete)
        assert sent.status == 200, sent.body
        parts = PartDecoder(sent.headers[b"content-type"].decode()).feed(sent.body)
        bodies = {part.index: part.body for part in parts}
        return [CapturedAnswer(200, bodies[index], records[index]) for index in range(num)]

    def body(self, body: Json) -> Json:
        """Return the request with default fields; fields that are None are removed."""
        shared: Json = {"model": self.endpoint.model_name, "max_tokens": 12}
        filled = shared | {"messages": user(self.abilities.question)} | body
        return {name: value for name, value in filled.items() if value is not None}

    def rendered(self, messages: list[Json], tools: list[Json] | None) -> list[int] | None:
        """Return the prompt by the model's chat template, or None for an engine without a model."""
        if self.abilities.model is None:
            return None
        plain = [message | {"content": _text(message["content"])} for message in messages]
        transformers: Any = importlib.import_module("transformers")
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.abilities.model)
        text = tokenizer.apply_chat_template(
            plain, tools=tools, add_generation_prompt=True, tokenize=False
        )
        return tokenizer.encode(text, add_special_tokens=False)

    async def close(self) -> None:
        await self.http.close()
        await self.client.close()
        await self.rollout.close()


class SentAnswer:
    """An ASGI `send` that keeps status and body of the answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.begun = asyncio.Event()
        """Set with the first bytes of the body."""

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.headers |= dict(message.get("headers", ()))
        self.body += message.get("body", b"")
        if self.body:
            self.begun.set()


async def start_rig(name: str, folder: Path) -> Rig:
    folders = weights_for(name, folder)
    abilities = ABILITIES[name]
    engine = abilities.engine or name
    spec = EngineSpec(
        engine,
        folder,
        abilities.model,
        "contract",
        extra_args=["--enable-lora"] if abilities.lora_rank else [],
        lora_rank=abilities.lora_rank,
    )
    rollout = ROLLOUTS[engine](spec)
    try:
        endpoint = await rollout.launch()
        if endpoint.takes_adapters:  # the server publishes before it connects to an engine
            await rollout.load_weights(folders[0], 0)
    except BaseException:
        await rollout.close()
        raise
    # The engine may close an idle connection at the moment when a test uses it.
    connector = aiohttp.UnixConnector(str(endpoint.socket), force_close=True)
    http = aiohttp.ClientSession(endpoint.url, connector=connector, headers=endpoint.headers)
    client = EngineClient(endpoint)
    await client.fetch_version()
    return Rig(name, rollout, endpoint, client, http, folders)


def weights_for(name: str, folder: Path) -> list[Path]:
    """Return two folders for `load_weights`: the initial weights, and clearly different weights."""
    if name == "fake":
        folders: list[Path] = []
        for theta in (-1.0, 2.0):
            folders.append(folder / f"theta{theta}")
            folders[-1].mkdir()
            (folders[-1] / "theta.json").write_bytes(orjson.dumps({"theta": theta}))
        return folders
    if ABILITIES[name].lora_rank:
        return adapters_for(folder, ABILITIES[name].lora_rank)
    other = folder / "other"
    shutil.copytree(DEMO_MODEL_DIR, other)
    _change(other)
    return [DEMO_MODEL_DIR, other]


def adapters_for(folder: Path, rank: int) -> list[Path]:
    """Return two folders with adapters: those that change nothing, and clearly different ones."""
    trainer = lora_trainer(rank)
    checkpoint: Any = importlib.import_module("fakevllm_server.backends.embedded.train.checkpoint")
    folders = [folder / "zero", folder / "changed"]
    for to, policy in zip(folders, ("reference", "trained"), strict=True):
        checkpoint.export_adapters(to, trainer, policy)
    return folders


def lora_trainer(rank: int, seed: int = 1) -> Any:
    """Return the embedded trainer of the demo's model, with adapters that change its answers."""
    torch: Any = importlib.import_module("torch")
    trainers: Any = importlib.import_module("fakevllm_server.backends.embedded.train.trainer")
    models: Any = importlib.import_module("fakevllm_server.backends.embedded.model_folder")

    def load() -> Any:
        return models.load_weights(DEMO_MODEL_DIR, torch.float32, torch.device("cpu"))

    trainer = trainers.PolicyTrainer(load(), load)
    trainer.set_lora(LoraSettings(rank, 2 * rank, "all-linear"), "the test")
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in trainer.model.named_parameters():
        if "lora_B" in name:
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(noise * 0.02)
    return trainer


def _change(folder: Path) -> None:
    """Scale all tensors. The result is like the export of a trainer, which has the same tensors
    with other values."""
    tensors: Any = importlib.import_module("safetensors.torch")
    file = folder / "model.safetensors"
    changed = {name: tensor * 0.7 for name, tensor in tensors.load_file(file).items()}
    tensors.save_file(changed, file, metadata={"format": "pt"})


def _text(content: Any) -> Any:
    is_in_parts = isinstance(content, list)
    return "".join(part["text"] for part in cast(list[Json], content)) if is_in_parts else content


def user(text: str) -> list[Json]:
    return [{"role": "user", "content": text}]


def chunks_of(raw: bytes) -> list[Json]:
    events = SseDecoder().feed(raw)
    assert events.pop() == DONE
    chunks = [parse_event(event) for event in events]
    return [chunk for chunk in chunks if chunk is not None]


def deltas_of(chunks: list[Json], index: int = 0) -> list[Json]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return [choice["delta"] for choice in choices if choice["index"] == index]


def text_of(chunks: list[Json], index: int = 0) -> str:
    return "".join(delta.get("content") or "" for delta in deltas_of(chunks, index))


def logprobs_of(choice: Json) -> list[Json]:
    return choice["logprobs"]["content"]


def shape_of(value: Any) -> Any:
    """Return the keys in their order, with whether each value is null, but without the values."""
    if isinstance(value, dict):
        return [(key, shape_of(inner)) for key, inner in cast(Json, value).items()]
    if isinstance(value, list):
        return [shape_of(inner) for inner in cast(list[Any], value)[:1]]
    return value is None
