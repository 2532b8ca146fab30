"""Run server calls against a list of scripted replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fakevllm.sdk.protocol import Pause, ServerCall, ServerReply, ServerRequest, ThrottledWarning
from fakevllm.sdk.types import ServerUnreachable

T = TypeVar("T")
NO_ANSWER = ServerUnreachable("nobody answers")


def reply(status: int = 200, **content: Any) -> ServerReply:
    return ServerReply(status, content)


def engine_reply(
    name: str, step: int = 1, detail: str | None = None, server_id: str = "s"
) -> ServerReply:
    return reply(
        engine_status=f"ENGINE.{name}",
        global_step=step,
        engine_status_detail=detail,
        run_id="r",
        server_id=server_id,
    )


@dataclass
class CallRecord(Generic[T]):
    """What a server call yielded, and its result."""

    requests: list[ServerRequest] = field(default_factory=list[ServerRequest])
    pauses: list[Pause] = field(default_factory=list[Pause])
    warnings: list[ThrottledWarning] = field(default_factory=list[ThrottledWarning])
    result: T | None = None

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    @property
    def waited_s(self) -> float:
        return sum(pause.seconds for pause in self.pauses)


def run_call(
    call: ServerCall[T],
    replies: Sequence[ServerReply | ServerUnreachable],
    record: CallRecord[T] | None = None,
) -> CallRecord[T]:
    """Run a call with these replies, and return what it yielded. The call must use all replies.

    If the call raises an exception, the exception is raised, and `record` has the values that the
    call yielded before.
    """
    record = record or CallRecord()
    left = list(replies)
    try:
        step = next(call)
        while True:
            if isinstance(step, ThrottledWarning):
                record.warnings.append(step)
                step = call.send(None)
                continue
            if isinstance(step, Pause):
                record.pauses.append(step)
                step = call.send(None)
                continue
            record.requests.append(step)
            result = left.pop(0)
            is_unreachable = isinstance(result, ServerUnreachable)
            step = call.throw(result) if is_unreachable else call.send(result)
    except StopIteration as end:
        record.result = end.value
    assert not left, f"replies that were not used: {left}"
    return record
