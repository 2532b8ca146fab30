"""Notes about one request of an app, from which its spans are made when the request has ended.

While a request is answered, only times and a few fields are noted. No span exists yet, so a request
costs little more than without tracing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from fakevllm.ledger.records import GroupRecord
from fakevllm_adapters.formats.base import Answer, Json

_SAMPLING_FIELDS = (
    *("model", "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens"),
    *("seed", "frequency_penalty", "presence_penalty", "n"),
)
"""Fields of a request body that spans contain. None of them has a text of a user, except for the
name of the model, which is redacted."""


@dataclass(slots=True)
class CallTrace:
    """The model call of one sibling, or the call to the fallback server. A call that is repeated
    during an outage is one call."""

    index: int
    """Index of the sibling. 0 for the call to the fallback server."""
    sampling: Json
    """Sampling fields of the call's body."""
    started_ns: int
    num_sharing: int = 1
    """Number of siblings that the call samples."""
    is_fallback: bool = False
    num_attempts: int = 1
    ended_ns: int | None = None
    """Time of the call's end; None if the request has ended before."""
    status: int | None = None
    """HTTP status of the engine's answer, or of the error in its place."""
    answer: Answer | None = None
    weight_version: str | None = None
    """Version of the weights, as the server sent it; None if it is unknown."""


@dataclass(slots=True)
class HookTrace:
    """One call of a hook."""

    name: str
    started_ns: int
    ended_ns: int | None = None
    """Time of the call's end; None if the request has ended before."""
    reason: str | None = None
    """Reason why the hook failed; None if it succeeded."""
    hook_hash: str | None = None
    """Digest of the hook files."""


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What is known about a request when its trace begins."""

    model: str
    """Model name as the app sent it."""
    sampling: Json
    """Sampling fields of the request's body."""
    is_text_completion: bool = False
    """Whether the request continues a prompt, and is no chat."""
    messages: object = None
    """Messages or prompt of the request in the upstream's format; None if spans have no content."""
    parent: Mapping[str, str] = field(default_factory=dict[str, str])
    """Headers of the W3C trace context that the app sent: `traceparent` and `tracestate`."""


@dataclass(frozen=True, slots=True)
class FinishedTrace:
    """All notes about a request that has ended."""

    facts: RequestFacts
    record: GroupRecord
    started_ns: int
    answered_ns: int
    """Time at which the app had its answer or an error."""
    ended_ns: int
    """Time at which the group ended, in Unix nanoseconds like the other times."""
    calls: tuple[CallTrace, ...] = ()
    hooks: tuple[HookTrace, ...] = ()


class RequestTrace:
    """The notes about one request that is being answered."""

    def __init__(
        self,
        facts: RequestFacts,
        on_finished: Callable[[FinishedTrace], None],
        now_ns: Callable[[], int] | None = None,
    ) -> None:
        """Begin the trace. `on_finished` gets all notes when the request has ended. `now_ns`
        returns the Unix time in nanoseconds, and must not go back."""
        self._facts = facts
        self._on_finished = on_finished
        self._now_ns = now_ns or _steady_clock()
        self._started_ns = self._now_ns()
        self._answered_ns: int | None = None
        self._calls: dict[int, CallTrace] = {}
        """Call by the index of its sibling."""
        self._fallback: CallTrace | None = None
        self._hooks: list[HookTrace] = []

    def begin_call(self, index: int, sampling: Json, num_sharing: int = 1) -> None:
        """Note that the call of sibling `index` begins, or is repeated."""
        call = self._calls.get(index)
        if call is None:
            self._calls[index] = CallTrace(index, sampling, self._now_ns(), num_sharing)
        else:
            call.num_attempts += 1
            call.num_sharing = num_sharing

    def end_call(
        self, index: int, status: int, answer: Answer | None, weight_version: str | None
    ) -> None:
        """Note how the call of sibling `index` has ended. The call may be repeated after this."""
        call = self._calls.get(index)
        if call is None:  # the call has failed before it began, for example in a queue
            return
        call.ended_ns = self._now_ns()
        call.status, call.answer, call.weight_version = status, answer, weight_version

    def begin_fallback(self) -> None:
        """Note that the fallback server is called."""
        sampling = self._facts.sampling
        self._fallback = CallTrace(0, sampling, self._now_ns(), is_fallback=True)

    def end_fallback(self, status: int) -> None:
        """Note that the fallback server has answered, or has failed with this HTTP status."""
        assert self._fallback is not None, "the fallback server was called"
        self._fallback.ended_ns = self._now_ns()
        self._fallback.status = status

    def begin_hook(self, name: str) -> HookTrace:
        """Note that a hook is called. Pass the result to `end_hook`."""
        hook = HookTrace(name, self._now_ns())
        self._hooks.append(hook)
        return hook

    def end_hook(self, hook: HookTrace, reason: str | None, hook_hash: str) -> None:
        """Note that a hook call has ended. `reason` is None if it succeeded."""
        hook.ended_ns, hook.reason, hook.hook_hash = self._now_ns(), reason, hook_hash or None

    def mark_answered(self) -> None:
        """Note that the app has its answer. Only the first call has an effect."""
        self._answered_ns = self._answered_ns or self._now_ns()

    def finish(self, record: GroupRecord) -> None:
        """Pass all notes on. `record` is the ledger's record of the request."""
        now_ns = self._now_ns()
        # Copies, because cancelled calls may still end while the notes are read in another thread.
        calls = tuple(replace(call) for call in self._all_calls())
        hooks = tuple(replace(hook) for hook in self._hooks)
        answered_ns = self._answered_ns or now_ns
        self._on_finished(
            FinishedTrace(self._facts, record, self._started_ns, answered_ns, now_ns, calls, hooks)
        )

    def _all_calls(self) -> Iterator[CallTrace]:
        yield from self._calls.values()
        if self._fallback is not None:
            yield self._fallback


def sampling_fields(body: Json) -> Json:
    """Return the fields of a request body that spans contain."""
    return {name: body[name] for name in _SAMPLING_FIELDS if body.get(name) is not None}


def _steady_clock() -> Callable[[], int]:
    """Return a clock with Unix nanoseconds that does not jump when the system's clock is set."""
    offset_ns = time.time_ns() - time.monotonic_ns()
    return lambda: time.monotonic_ns() + offset_ns
