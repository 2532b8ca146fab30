"""The engine seams.

The server holds a Backend: a Rollout that answers vLLM's HTTP and a Trainer that turns batches
into weights.
Inside an engine's own process, `door.py` puts that HTTP over a TokenEngine and control routes over
a TrainEngine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Protocol

from fakevllm_adapters.job.loss_spec import LossSpec as LossSpec
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.packed_numbers import (
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from fakevllm_adapters.vllm_compat.chat import ChatRequest
from fakevllm_server.types.sampling import Sampling, Token
from fakevllm_server.types.token_masks import TokenMasks
from fakevllm_server.types.weight_gate import WeightGate

StepMetrics = dict[str, float]
"""What a step measured, as it is, finite or not; what it did not measure is absent."""
PolicyName = Literal["trained", "reference"]
"""The trainer's weights as they stand, or the model's starting weights."""


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call to train on: what the engine saw, what it sampled, and what that was worth.

    >>> call = Call("g", [1, 2], [3], [-0.5], version=0, temperature=1.0, advantage=1.2, weight=1.0)
    >>> Call.from_wire(call.to_wire()) == call
    True
    """

    group_id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """Of the response, under the distribution sampled from; as long as response_ids."""
    version: int
    """Oldest weights that sampled a token of it."""
    temperature: float
    advantage: float | Sequence[float]
    """Of every trained token of the response, or one for each."""
    weight: float
    """Of each of its tokens in the loss."""
    unit: str | None = None
    """Calls of the same unit are one sequence to the loss; None is a unit of its own."""
    allowed: TokenMasks | None = None
    """What each token of the response was chosen from; None: all of the vocabulary."""

    @property
    def is_trained(self) -> Sequence[bool]:
        """For each token of the response, whether it is in the loss and its denominators: not where
        nothing else could have been sampled."""
        if self.allowed is None:
            return [True] * len(self.response_ids)
        return [not forced for forced in self.allowed.is_forced]

    @property
    def num_trained(self) -> int:
        return len(self.response_ids) - (self.allowed.num_forced if self.allowed else 0)

    @property
    def advantages(self) -> Sequence[float]:
        """One for each trained token."""
        if isinstance(self.advantage, int | float):
            return [self.advantage] * self.num_trained
        return self.advantage

    def to_wire(self) -> dict[str, Any]:
        arrays: dict[str, Any] = {
            "prompt_ids": pack_ids(self.prompt_ids),
            "response_ids": pack_ids(self.response_ids),
            "logprobs": pack_floats(self.logprobs),
        }
        if not isinstance(self.advantage, int | float):
            arrays["advantage"] = pack_floats(self.advantage)
        allowed = None if self.allowed is None else self.allowed.to_wire()
        # Not asdict: it would copy every id, to throw it away.
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        return own | arrays | {"allowed": allowed}

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> Call:
        arrays: dict[str, Any] = {
            "prompt_ids": unpack_ids(wire["prompt_ids"]),
            "response_ids": unpack_ids(wire["response_ids"]),
            "logprobs": unpack_floats(wire["logprobs"]),
        }
        if isinstance(wire["advantage"], str):
            arrays["advantage"] = unpack_floats(wire["advantage"])
        if wire.get("allowed") is not None:
            arrays["allowed"] = TokenMasks.from_wire(wire["allowed"])
        return Call(**(wire | arrays))


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step trains on. Sharing common prefixes is the trainer's own business."""

    step: int
    calls: Sequence[Call]
    version: int | None = None
    """Of the weights that are trained, as they stand before the step; None where it is not
    known."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine answers vLLM's HTTP, and what it serves there."""

    socket: Path | None
    """Unix socket, or None for a remote `url`."""
    url: str
    model_name: str
    max_model_len: int
    default_sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the engine samples with where a request is silent (the model's generation_config)."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Sent with every call, such as the key of an engine somebody else runs."""
    refusal: str | None = None
    """Why nothing may train on what this engine samples; it serves all the same."""
    reports_allowed: bool = False
    """Whether it knows `return_allowed_tokens`, and its trainer what to do with the answer."""
    gate: WeightGate = field(default_factory=WeightGate)


class BackendError(Exception):
    """An engine did not do what it was asked; the message says which and why."""


class ActionFailed(BackendError):
    """An engine answered that it could not: it lives, and what it serves goes on."""


class BackendRefused(BackendError):
    """An engine that will not start, or take its job, however often it is tried: the user must mend
    something."""


class Rollout(Protocol):
    async def launch(self) -> Endpoint: ...
    async def load_weights(self, folder: Path, version: int) -> None:
        """A Hugging Face folder now samples, as `version`. No request is refused meanwhile."""
        ...

    async def health(self) -> bool:
        """Whether it is up and answers."""
        ...

    async def lost(self) -> str:
        """Returns once the engine has died or hangs, with what is known of why."""
        ...

    async def close(self) -> None: ...


class Trainer(Protocol):
    async def launch(self) -> object: ...
    async def boot(self, job: TrainJob) -> None: ...
    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics: ...

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        """Of each trained token of each response, as it was chosen. Only where a job needs it
        (`use_kl_in_reward`): a trainer that has none refuses such a job when it boots."""
        ...

    async def export(self, folder: Path) -> None: ...
    async def save(self, folder: Path) -> None: ...
    async def restore(self, folder: Path) -> None: ...
    async def health(self) -> bool: ...
    async def lost(self) -> str: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BackendStart:
    """What a start of a backend came to."""

    endpoint: Endpoint
    """The same object as before where the rollout engine went on."""
    trainer_is_new: bool
    """It has the model's starting weights, whatever was trained before."""
    refusal: str | None = None
    """Why there is no trainer, and will be none until the user mends it; the engine serves all the
    same."""


class Backend(Protocol):
    """A rollout and a trainer that belong together."""

    @property
    def trainer(self) -> Trainer: ...

    async def start(self) -> BackendStart:
        """Starts what does not run; what runs and answers goes on."""
        ...

    async def is_sampling(self) -> bool:
        """Whether calls are answered, whatever has become of the trainer."""
        ...

    async def publish(self, version: int) -> None:
        """The trainer's weights now sample, as `version`. No request is refused meanwhile."""
        ...

    async def lost(self) -> str:
        """Returns once an engine has died, with what is known of why."""
        ...

    async def close(self) -> None: ...


# --- inside an engine's process


class TokenEngine(Protocol):
    """Token ids in, sampled tokens out. Knows the tokenizer and the chat template, not HTTP."""

    model_name: str
    max_model_len: int
    default_sampling: dict[str, Any]
    eos_ids: frozenset[int]
    reports_allowed: bool
    """Whether its tokens say what they were chosen from, where `Sampling` asks for it."""

    def render(self, request: ChatRequest) -> list[int]:
        """The prompt of a conversation, by the model's chat template. Raises WireError (400)."""
        ...

    def check(self, sampling: Sampling) -> None:
        """Raises WireError (400) for what this engine cannot sample so; `generate` would too, but
        then the first byte of a stream may be out."""
        ...

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        """Sampled tokens in order, the end-of-sequence token included; closing the iterator
        cancels."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """With or without those a tokenizer sets around a text of its own accord."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """As the vocabulary spells them."""
        ...

    @property
    def num_waiting(self) -> int:
        """Requests nothing is sampled for yet."""
        ...


class TrainEngine(Protocol):
    """The training half of an engine's process."""

    async def boot(self, job: TrainJob) -> str | None:
        """What is trained, in one line, where it tells. Raises BackendRefused for a job it will
        never take."""
        ...

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics: ...
    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]: ...

    async def publish(self, version: int) -> None:
        """The trainer's weights become the sampler's, as `version`."""
        ...

    async def load_weights(self, folder: Path, version: int) -> None: ...

    async def export(self, folder: Path) -> None:
        """A Hugging Face folder that `--model` accepts."""
        ...

    async def save(self, folder: Path) -> None:
        """Everything a bit-equal continuation needs: weights, optimiser, random state."""
        ...

    async def restore(self, folder: Path) -> None: ...
