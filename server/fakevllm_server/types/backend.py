"""Interfaces between the server and its engines.

The server has one Backend, which consists of a Rollout and a Trainer. The Rollout samples: it
answers requests in the format of vLLM's HTTP API. The Trainer updates the weights from batches.
Rollout and Trainer are objects in the server's process. This project's own engines run in processes
of their own. Inside such a process, a TokenEngine samples and a TrainEngine trains, and
`backends/http/engine_server.py` makes them available over HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager
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
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_server.types.demonstrations import Demonstration
from fakevllm_server.types.known_prompt import ProbeReply
from fakevllm_server.types.sampling import Sampling, Token
from fakevllm_server.types.token_masks import TokenMasks
from fakevllm_server.types.weight_versions import WeightGate

StepMetrics = dict[str, float]
"""Measurements of a step, by metric name. Values may be infinite or NaN. A metric that the step did
not measure is absent."""
PolicyName = Literal["trained", "reference"]
"""`trained`: the trainer's current weights. `reference`: the model's initial weights."""


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call to train on. It has the prompt, the sampled response, and the advantage.

    >>> call = Call("g", [1, 2], [3], [-0.5], version=0, temperature=1.0, advantage=1.2, weight=1.0)
    >>> Call.from_wire(call.to_wire()) == call
    True
    """

    group_id: str
    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    logprobs: Sequence[float]
    """Log-probability of each response token, under the distribution from which the token was
    sampled. The sequence is as long as `response_ids`."""
    version: int
    """Oldest weight version that sampled a token of the response."""
    temperature: float
    advantage: float | Sequence[float]
    """One number for all trained tokens of the response, or a sequence with one number for each
    trained token."""
    weight: float
    """Weight of each token of the response in the loss."""
    unit: str | None = None
    """Name of the call's unit. The loss treats all calls of a unit as one sequence. If the name is
    None, the call is a unit by itself."""
    allowed: TokenMasks | None = None
    """For each response token, the set of tokens from which it was sampled. None means the whole
    vocabulary."""

    @property
    def is_trained(self) -> Sequence[bool]:
        """For each response token, whether it is trained. A trained token counts in the loss and in
        the loss's denominators.

        A forced token is not trained. A forced token is the only token that could be sampled at its
        position.
        """
        if self.allowed is None:
            return [True] * len(self.response_ids)
        return [not forced for forced in self.allowed.is_forced]

    @property
    def num_trained(self) -> int:
        """Number of response tokens of this call that are trained. Forced tokens are not counted. A
        token is forced if a grammar or `allowed_token_ids` allowed only this token at its position.
        """
        return len(self.response_ids) - (self.allowed.num_forced if self.allowed else 0)

    @property
    def advantages(self) -> Sequence[float]:
        """One advantage for each trained token of this call."""
        if isinstance(self.advantage, int | float):
            return [self.advantage] * self.num_trained
        return self.advantage

    def to_wire(self) -> dict[str, Any]:
        """Return the call as a JSON object, which `from_wire` parses."""
        arrays: dict[str, Any] = {
            "prompt_ids": pack_ids(self.prompt_ids),
            "response_ids": pack_ids(self.response_ids),
            "logprobs": pack_floats(self.logprobs),
        }
        if not isinstance(self.advantage, int | float):
            arrays["advantage"] = pack_floats(self.advantage)
        allowed = None if self.allowed is None else self.allowed.to_wire()
        # Do not use asdict: it would copy every token id, and `arrays` replaces the copies.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | arrays | {"allowed": allowed}

    @staticmethod
    def from_wire(wire: dict[str, Any]) -> Call:
        """Return the call from the JSON object that `to_wire` returns."""
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
    """The calls and the demonstrations that one step trains on. If several calls or demonstrations
    share a prefix, a trainer may compute the prefix once for all of them."""

    step: int
    calls: Sequence[Call]
    version: int | None = None
    """Version of the trainer's weights before the step, or None if it is not known."""
    demonstrations: Sequence[Demonstration] = ()
    """Answers to imitate or to avoid, for a demonstration loss."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address at which an engine answers requests in vLLM's format, and the model that the
    engine serves."""

    socket: Path | None
    """Path of the engine's Unix socket, or None if the engine is reached over TCP at `url`."""
    url: str
    model_name: str
    max_model_len: int
    default_sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    """Sampling parameters that the engine uses when a request does not set them, from the model's
    generation_config."""
    headers: dict[str, str] = field(default_factory=dict[str, str])
    """HTTP headers to send with every call, such as the API key for an engine that the user
    runs."""
    refusal: str | None = None
    """Reason why calls of this engine must not be trained on. None if they may be trained on. The
    engine serves apps in either case."""
    reports_allowed: bool = False
    """Whether the engine supports `return_allowed_tokens` and the trainer can use the reported
    sets."""
    is_bundled: bool = False
    """Whether the engine is one of this project. Such an engine can send the token ids of a prompt
    as bytes in front of an answer. It can also send each choice of a call as soon as the choice is
    complete."""
    holds_policies: bool = False
    """Whether the engine can hold policies, which are other versions of the weights, beside the
    weights that it serves."""
    takes_adapters: bool = False
    """Whether the engine loads weights and policies as folders with LoRA adapters, and not as whole
    models."""
    gate: WeightGate = field(default_factory=WeightGate)
    """Gate that every call to the engine passes. The gate may be closed while the weights
    change."""
    replica: str | None = None
    """Name of the engine in a fleet of several replicas; None for the only engine."""


class BackendError(Exception):
    """Error for a failed action of an engine, such as a start or a training step. The message names
    the engine and the reason."""


class ActionFailed(BackendError):
    """Error for a failed action of a running engine, such as a training step. The engine continues
    to run and to answer calls."""


class BackendRefused(BackendError):
    """Error for an engine that cannot start, or that cannot do what the job needs. A retry would
    fail. The message names the cause, which the user must fix."""


class Rollout(Protocol):
    """Interface through which the server uses an engine that samples."""

    async def launch(self) -> Endpoint:
        """Start the rollout engine, and return the address at which it answers requests."""
        ...

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load the weights in a Hugging Face folder into the engine, and serve them as `version`.
        If `Endpoint.takes_adapters` is true, the folder has LoRA adapters in peft's layout.

        Requests that arrive during the load may have to wait. They are not refused.
        """
        ...

    async def load_policy(self, name: str, folder: Path, version: int) -> None:
        """Load the weights in a folder as a policy, which the engine holds beside the weights that
        it serves. The folder has the same form as for `load_weights`. Calls that request `name` as
        their model are then sampled with the policy. If the policy is loaded already, do nothing.

        Call this method only if `Endpoint.holds_policies` is true. Raises ActionFailed in three
        cases: the name was given to another version before, the engine holds too many policies, or
        the weights do not fit the model.
        """
        ...

    async def unload_policy(self, name: str) -> None:
        """Remove a policy (weights that `load_policy` has loaded) from the engine. Running requests
        of the policy end normally. If the policy is not loaded, do nothing."""
        ...

    async def policies(self) -> dict[str, int]:
        """Return the name and the version of each policy (weights loaded by `load_policy`)."""
        ...

    async def probe(self) -> ProbeReply | None:
        """Return the log-probabilities of the known prompt (one fixed text, with which the server
        checks the engine's weights) under the weights that the engine serves now. Return None if
        the engine cannot report them."""
        ...

    async def health(self) -> bool:
        """Return True if the engine runs and answers a health check."""
        ...

    async def lost(self) -> str:
        """Wait until the engine has died or hangs. Return a message that says what happened. If the
        cause is known, the message names the cause."""
        ...

    async def close(self) -> None: ...


class Trainer(Protocol):
    """Interface through which the server uses an engine that updates the weights."""

    async def launch(self) -> object: ...
    async def boot(self, job: TrainJob) -> None:
        """Prepare the trainer for a job. Raises BackendRefused if the trainer cannot train the
        job."""
        ...

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        """Update the weights from one batch, and return the metrics of the step."""
        ...

    async def log_probs(
        self, calls: Sequence[Call], policy: PolicyName
    ) -> Sequence[Sequence[float]]:
        """Return the log-probabilities of each call's trained response tokens under the trained
        weights or the reference weights, as `policy` says.

        The log-probabilities are those of sampling: with the call's temperature, and over the set
        of allowed tokens at each position.
        """
        ...

    async def export(self, folder: Path) -> None:
        """Write the trainer's weights to a folder in Hugging Face format. The server's flag
        `--model` accepts this folder."""
        ...

    async def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        """Write the trained LoRA adapters to a folder in peft's layout. If `policy` is `reference`,
        write adapters that change nothing instead.

        Call this method only for jobs that train adapters. Raises BackendRefused if the trainer has
        no adapters.
        """
        ...

    async def save(self, folder: Path) -> None:
        """Write a checkpoint of the trainer to `folder`: weights, optimizer and random state."""
        ...

    async def restore(self, folder: Path) -> None:
        """Load the checkpoint in `folder` into the trainer. Later steps continue from it."""
        ...

    async def health(self) -> bool:
        """Return True if the trainer runs and answers a health check."""
        ...

    async def lost(self) -> str:
        """Wait until the trainer has died or hangs. Return a message that says what happened. If
        the cause is known, the message names the cause."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class BackendStart:
    """Result of starting the engines: the address of the rollout engine, and the state of the
    trainer."""

    endpoint: Endpoint
    """Address of the rollout engine. If the engine was already running, this is the same object as
    at the previous start."""
    trainer_is_new: bool
    """Whether this start created the trainer. A new trainer has the model's initial weights, even
    if the run has trained the model before."""
    refusal: str | None = None
    """Reason why there is no trainer, which the user must fix. None if there is a trainer. The
    rollout engine answers apps even without a trainer."""


class Backend(Protocol):
    """Interface of a rollout engine together with the trainer that updates its weights."""

    @property
    def trainer(self) -> Trainer: ...

    @property
    def rollout(self) -> Rollout: ...

    async def start(self) -> BackendStart:
        """Start each engine that is not running, and keep each engine that runs and answers."""
        ...

    async def is_sampling(self) -> bool:
        """Return True if the rollout engine answers calls, even if the trainer does not run."""
        ...

    def training(self) -> AbstractAsyncContextManager[None]:
        """Return a context in which a training step is made and its weights are published. If both
        engines use the memory of the same GPU in turn, the rollout engine frees its memory when the
        context begins. It serves again when new weights are published, or when the context ends.
        """
        ...

    async def publish(self, version: int) -> None:
        """Load the trainer's weights into the rollout engine, and serve them as `version`.

        Requests that arrive during the load may have to wait. They are not refused.
        """
        ...

    async def probe(self) -> ProbeReply | None:
        """Return the log-probabilities of the known prompt (one fixed text) under the weights that
        the rollout engine serves, as `Rollout.probe` does."""
        ...

    async def close_rollout(self) -> None:
        """Stop the rollout engine, so that it answers no more calls. The next call of `start`
        starts the rollout engine again. If one engine samples and trains, the trainer stops too."""
        ...

    async def lost(self) -> str:
        """Wait until one of the engines has died or hangs. Return a message that says what
        happened. If the cause is known, the message names the cause."""
        ...

    async def close(self) -> None: ...


# --- interfaces inside an engine's process


class TokenEngine(Protocol):
    """Interface of the part of an engine's process that samples tokens for a prompt of token ids.
    It has the tokenizer and the chat template, and contains no HTTP code.

    `render`, `check`, `encode`, `decode` and `token_strings` may be called from several threads at
    the same time.
    """

    model_name: str
    max_model_len: int
    max_prompt_bytes: int
    """Size in bytes of the largest text that can fit into the context: `max_model_len` times the
    size of the longest token."""
    default_sampling: dict[str, Any]
    eos_ids: frozenset[int]
    reports_allowed: bool
    """Whether the engine sets `Token.allowed` when `Sampling.reports_allowed` is true."""

    def render(self, request: ChatRequest) -> list[int]:
        """Return the prompt's token ids for a conversation, rendered with the model's chat
        template.

        If the text is larger than `max_prompt_bytes` and the request allows truncation, the text is
        cut. Raises WireError (400) if the text is too large and the request does not allow
        truncation, or if the template refuses the conversation.
        """
        ...

    def check(self, sampling: Sampling) -> None:
        """Raise WireError (400) if the engine does not support these sampling parameters.

        Call this method before `generate`. Otherwise `generate` raises the error, possibly after
        the first bytes of a stream were sent.
        """
        ...

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[list[Token]]:
        """Sample a completion and yield its tokens in order, including the end-of-sequence token.

        If the caller closes the generator, sampling stops.
        """
        ...

    async def probe(self) -> ProbeReply:
        """Return the log-probabilities of the known prompt (one fixed text, with which the server
        checks the engine's weights) under the weights that `generate` uses. This call does not
        change any sampled answer."""
        ...

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text.

        If `add_special_tokens` is True, the ids include the special tokens that the tokenizer puts
        around a text.
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_strings(self, ids: Sequence[int]) -> list[str]:
        """Return each token's string in the vocabulary."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of requests for which no token has been sampled yet."""
        ...


class TrainEngine(Protocol):
    """Interface of the part of an engine's process that trains."""

    async def boot(self, job: TrainJob) -> str | None:
        """Prepare the engine for a job.

        Return a log line that describes what is trained, or None. Raises BackendRefused for a job
        that the engine cannot train.
        """
        ...

    async def step(self, batch: Batch, loss: LossSpec) -> StepMetrics:
        """Update the weights from one batch, and return the metrics of the step."""
        ...

    async def log_probs(self, calls: Sequence[Call], policy: PolicyName) -> list[list[float]]:
        """Return the log-probabilities of each call's trained response tokens under the trained
        weights or the reference weights, as `policy` says. `Trainer.log_probs` describes them."""
        ...

    async def publish(self, version: int) -> None:
        """From now on, sample with the trainer's current weights, whose number is `version`."""
        ...

    async def load_weights(self, folder: Path, version: int) -> None:
        """Load the weights in a Hugging Face folder, and sample with them from now on. `version` is
        the version number of these weights."""
        ...

    async def export(self, folder: Path) -> None:
        """Write the trainer's weights to a folder in Hugging Face format. The server's flag
        `--model` accepts this folder."""
        ...

    async def export_adapters(self, folder: Path, policy: PolicyName) -> None:
        """Write the LoRA adapters to `folder`, as `Trainer.export_adapters` describes."""
        ...

    async def save(self, folder: Path) -> None:
        """Write a checkpoint with everything that a bit-identical continuation needs: weights,
        optimizer and random state."""
        ...

    async def restore(self, folder: Path) -> None:
        """Load the checkpoint in `folder`. Later training steps continue from it."""
        ...
