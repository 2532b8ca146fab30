"""Measure the server's CPU time for the capture of one token of a streamed chat answer.

    python -m benchmarks.token_capture [--tokens 20000] [--rounds 7] [--write]

The events come from the writer of the bundled engines, which writes the same events as vLLM. No
socket is used. The floor is to parse each event with orjson and to serialise it again. The capture
is also compared with a capture that parses each event.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.results import conditions, markdown_table, replace_section
from fakevllm_adapters.formats.sse import DONE, SseDecoder, encode, parse_event
from fakevllm_adapters.vllm_compat.chat_response import ChatWriter
from fakevllm_server.rollout.capture.chat_tokens import ChatCapture
from fakevllm_server.types.weight_versions import CallStamp

TITLE = "token_capture"
HEADER = ("what", "CPU µs per token", "x the capture that parses")
WORDS = (" the", " a", " token", "\n", ' "quoted"', " naïve", " of", " stream", ".", " 日本")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=20_000, help="tokens of one answer")
    parser.add_argument("--rounds", type=int, default=7, help="answers; the cheapest counts")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    events = _events(args.tokens)
    actions = {
        "parse and serialise again (floor)": lambda: _serialise_again(events),
        "capture that parses each event": lambda: _capture(events, ParsingCapture),
        "capture": lambda: _capture(events, ChatCapture),
    }
    costs_us = _cheapest_us(actions, args)
    parsing_us = costs_us["capture that parses each event"]
    rows = [
        [name, f"{cost_us:.2f}", f"{cost_us / parsing_us:.2f}"]
        for name, cost_us in costs_us.items()
    ]
    table = Table(*HEADER, title="capture of a streamed token")
    for row in rows:
        table.add_row(*row)
    Console(width=120).print(table)
    if args.write:
        replace_section(TITLE, f"{text}\n{markdown_table(HEADER, rows)}")


class ParsingCapture(ChatCapture):
    """A capture that parses each event, also the usual ones."""

    def __init__(self, body: dict[str, Any], defaults: dict[str, Any]) -> None:
        super().__init__(body, defaults)
        self._token_events = None


def _cheapest_us(
    actions: Mapping[str, Callable[[], object]], args: argparse.Namespace
) -> dict[str, float]:
    """Return for each action the CPU time per token, in microseconds, of its fastest round. The
    actions take turns."""
    costs_s: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(args.rounds):
        for name, action in actions.items():
            before_s = time.process_time()
            action()
            costs_s[name].append(time.process_time() - before_s)
    return {name: 1e6 * min(rounds_s) / args.tokens for name, rounds_s in costs_s.items()}


def _events(num_tokens: int) -> list[bytes]:
    rng = random.Random(0)
    writer = ChatWriter("chatcmpl-98333fd69335c70c", 1795245319, "Qwen/Qwen2.5-7B", "vllm-0.27")
    chunks = [writer.role_chunk(0, [1, 2, 3])]
    for _ in range(num_tokens):
        word = rng.choice(WORDS)
        logprob = {
            "token": word,
            "logprob": -rng.random(),
            "bytes": list(word.encode()),
            "top_logprobs": [],
        }
        ids = [rng.randrange(150_000)]
        chunks.append(writer.delta_chunk(0, {"content": word}, {"content": [logprob]}, ids))
    end = writer.delta_chunk(0, {"content": ""}, None, [])
    end["choices"][0]["finish_reason"] = "stop"
    usage = {"prompt_tokens": 3, "total_tokens": 3 + num_tokens, "completion_tokens": num_tokens}
    return [*map(encode, [*chunks, end, writer.usage_chunk(usage)]), DONE]


def _capture(events: Sequence[bytes], capture_class: type[ChatCapture]) -> None:
    capture = capture_class({"messages": [], "model": "m", "stream": True}, {})
    decoder = SseDecoder()
    for chunk in events:
        for event in decoder.feed(chunk):
            capture.event(event)
    call = capture.record(CallStamp([1]))
    assert call is not None and call.untrainable is None, call
    assert len(call.response_ids) == len(events) - 4


def _serialise_again(events: Sequence[bytes]) -> None:
    for event in events:
        chunk = parse_event(event)
        assert chunk is None or orjson.dumps(chunk)


if __name__ == "__main__":
    main()
