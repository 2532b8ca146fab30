"""The scheduler. It decides for each request if the request is decoded, is prefilled, or waits. It
uses no tensors, no clock and no threads.

Requests are served in order of arrival. The method `schedule` takes the requests from the queue one
by one. A request

    joins the running requests    if the keys and values of its prompt are cached,
    waits for a prefill           if this prefill computes the same prompt,
    is added to a new prefill     if no prefill is running and the new one has room.

All prompts of a prefill have the same number of cached tokens at their beginning, because the
tokens after the cached tokens are computed together. Only one prefill runs at a time. `schedule`
stops at the first request for which none of these is possible, or for which there is too little
memory. This request and all later requests wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fakevllm_server.backends.embedded.decode.request import DecodeRequest


@dataclass(slots=True)
class SchedulerOutput:
    """The result of one call of `Scheduler.schedule`."""

    joining: list[DecodeRequest] = field(default_factory=list[DecodeRequest])
    """Requests to decode from now on. Their prefixes are cached, or empty."""
    prefill: dict[bytes, list[int]] = field(default_factory=dict[bytes, list[int]])
    """Token ids of the prefixes (all ids of a request except the last) to compute now, by
    `prefix_key`."""
    num_cached: int = 0
    """How many of the first tokens of each of these prefixes are cached."""


class Scheduler:
    """The queue of waiting requests, and the requests in prefill."""

    def __init__(self, max_rows: int, max_prefill_tokens: int) -> None:
        self.max_rows = max_rows
        self.max_prefill_tokens = max_prefill_tokens
        """Maximum number of padded tokens of one prefill. A single longer prompt is prefilled
        alone, in pieces."""
        self.waiting: deque[DecodeRequest] = deque()
        self.prefilling: dict[bytes, list[DecodeRequest]] = {}
        """The requests that wait for each prefix of the running prefill, by key."""

    @property
    def num_prefilling(self) -> int:
        return sum(map(len, self.prefilling.values()))

    def add(self, request: DecodeRequest) -> None:
        self.waiting.append(request)

    def put_back(self, requests: list[DecodeRequest]) -> None:
        """Put interrupted requests at the front of the waiting queue, in the order of
        `requests`."""
        self.waiting.extendleft(reversed(requests))

    def schedule(
        self,
        num_rows: int,
        num_cached: Callable[[list[int]], int],
        fits: Callable[[int, int], bool],
    ) -> SchedulerOutput:
        """Take requests from the waiting queue. Return the requests that are decoded from now on,
        and the prompts to prefill.

        `num_rows` is the number of requests that are being decoded already. `num_cached(ids)`
        returns how many tokens at the beginning of `ids` are cached. `fits(rows, length)` returns
        True if the KV cache has memory for `rows` requests of `length` tokens.
        """
        output = SchedulerOutput()
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
            key, prefix = request.prefix_key, request.prefix
            cached = num_cached(prefix)
            if cached == len(prefix):
                output.joining.append(request)
            elif key in self.prefilling:
                self.prefilling[key].append(request)
            elif can_open and self._has_room(output, len(prefix), cached):
                output.prefill[key] = prefix
                output.num_cached = cached
                self.prefilling[key] = [request]
            else:
                break
            self.waiting.popleft()
            taken += 1
        return output

    def prefilled(self) -> dict[bytes, list[DecodeRequest]]:
        """Record that the running prefill has finished. Return the requests that waited for the
        prefill, by the key of their prompt prefix."""
        done, self.prefilling = self.prefilling, {}
        return done

    def abandon_prefill(self) -> None:
        """Abandon the running prefill, because the weights are about to change. The requests that
        waited for the prefill return to the front of the waiting queue."""
        self.put_back([request for waiting in self.prefilled().values() for request in waiting])

    def _has_room(self, output: SchedulerOutput, length: int, cached: int) -> bool:
        """Return True if the prefill in `output`, which is being planned, has room for one more
        prompt prefix. The prefix has `length` tokens, and its first `cached` tokens are cached."""
        if not output.prefill:
            return True
        longest = max([length, *map(len, output.prefill.values())])
        num_tokens = (longest - cached) * (len(output.prefill) + 1)
        return cached == output.num_cached and num_tokens <= self.max_prefill_tokens
