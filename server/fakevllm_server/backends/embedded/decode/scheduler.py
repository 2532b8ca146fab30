"""Who is decoded, who is prefilled, who waits. Pure: no tensors, no clock, no thread.

First come, first served, in rounds. In a round a waiting request joins the decoding rows when
its prefix is known, goes along with a prefill of the same prefix, or opens a prefill of its own
while that has room. Only one prefill runs at a time. The first one that finds no room ends the
round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from fakevllm_server.backends.embedded.decode.request import DecodeRequest


@dataclass(slots=True)
class SchedulerOutput:
    """What one round decided."""

    joining: list[tuple[DecodeRequest, bytes]] = field(
        default_factory=list[tuple[DecodeRequest, bytes]]
    )
    """Their prefix is known: decode them from now on."""
    prefill: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])
    """Prefixes to compute now, by key."""


class Scheduler:
    def __init__(self, max_rows: int, max_prefill_tokens: int) -> None:
        self.max_rows = max_rows
        self.max_prefill_tokens = max_prefill_tokens
        """Padded tokens of one prefill; a single longer prompt is prefilled alone, in pieces."""
        self.waiting: deque[DecodeRequest] = deque()
        self.prefilling: dict[bytes, list[DecodeRequest]] = {}
        """Who waits for which running prefill."""

    @property
    def num_prefilling(self) -> int:
        return sum(map(len, self.prefilling.values()))

    def add(self, request: DecodeRequest) -> None:
        self.waiting.append(request)

    def put_back(self, requests: list[DecodeRequest]) -> None:
        """Preempted: they were first, and stay first, in this order."""
        self.waiting.extendleft(reversed(requests))

    def plan(
        self, num_rows: int, known: Container[bytes], fits: Callable[[int, int], bool]
    ) -> SchedulerOutput:
        """One round. `num_rows` are being decoded; `fits(rows, length)` tells whether the memory
        allows.
        """
        decided = SchedulerOutput()
        can_open = not self.prefilling
        taken = num_rows + self.num_prefilling
        longest = 0
        while self.waiting and taken < self.max_rows:
            request = self.waiting[0]
            if request.cancelled:
                self.waiting.popleft()
                continue
            longest = max(longest, len(request.ids) + 1)
            if not fits(taken + 1, longest):
                break
            key = request.prefix_key
            if not key or key in known:
                decided.joining.append((request, key))
            elif key in self.prefilling:
                self.prefilling[key].append(request)
            elif can_open and self._has_room(decided.prefill, len(request.ids) - 1):
                decided.prefill[key] = request.ids[:-1]
                self.prefilling[key] = [request]
            else:
                break
            self.waiting.popleft()
            taken += 1
        return decided

    def prefilled(self) -> dict[bytes, list[DecodeRequest]]:
        """The running prefill is over: those who waited for it, by key."""
        done, self.prefilling = self.prefilling, {}
        return done

    def abandon_prefill(self) -> None:
        """Its weights are about to change: those who waited for it go first in the next round."""
        self.put_back([request for waiting in self.prefilled().values() for request in waiting])

    def _has_room(self, opened: dict[bytes, list[int]], length: int) -> bool:
        longest = max([length, *map(len, opened.values())])
        return not opened or longest * (len(opened) + 1) <= self.max_prefill_tokens
