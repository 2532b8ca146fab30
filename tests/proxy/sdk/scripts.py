"""Plays the server's part of a talk, answer by answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from fakevllm.sdk.protocol import Answer, Ask, Pause, Remark, Talk
from fakevllm.sdk.types import ServerUnreachable

T = TypeVar("T")
NOBODY = ServerUnreachable("nobody answers")


def said(status: int = 200, **content: Any) -> Answer:
    return Answer(status, content)


def state(name: str, step: int = 1, detail: str | None = None, server_id: str = "s") -> Answer:
    return said(
        engine_status=f"ENGINE.{name}",
        global_step=step,
        engine_status_detail=detail,
        run_id="r",
        server_id=server_id,
    )


@dataclass
class Played(Generic[T]):
    asks: list[Ask] = field(default_factory=list[Ask])
    pauses: list[Pause] = field(default_factory=list[Pause])
    remarks: list[Remark] = field(default_factory=list[Remark])
    result: T | None = None

    @property
    def paths(self) -> list[str]:
        return [ask.path for ask in self.asks]

    @property
    def waited_s(self) -> float:
        return sum(pause.seconds for pause in self.pauses)


def play(
    talk: Talk[T], answers: Sequence[Answer | ServerUnreachable], played: Played[T] | None = None
) -> Played[T]:
    """All answers must be asked for. Raises what the talk raises; `played` tells what came
    before."""
    played = played or Played()
    left = list(answers)
    try:
        wanted = next(talk)
        while True:
            if isinstance(wanted, Remark):
                played.remarks.append(wanted)
                wanted = talk.send(None)
                continue
            if isinstance(wanted, Pause):
                played.pauses.append(wanted)
                wanted = talk.send(None)
                continue
            played.asks.append(wanted)
            answer = left.pop(0)
            unreachable = isinstance(answer, ServerUnreachable)
            wanted = talk.throw(answer) if unreachable else talk.send(answer)
    except StopIteration as end:
        played.result = end.value
    assert not left, f"never asked for: {left}"
    return played
