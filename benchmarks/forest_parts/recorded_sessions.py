"""Calls to train on: recorded sessions of opencode, rendered with the demo's tokenizer and chat
template.

The recordings contain only requests. The answer to a request is read from the history in the next
request. If no later request contains the answer, random tokens replace it. With fakevllm's proxy,
each call would have had N siblings. Therefore N - 1 siblings are added to each call. They have
random tokens and the length of the answer.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from benchmarks.forest_parts.cases import Case, random_ids
from benchmarks.recorded_traffic import FOLDER, expand_lines
from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_server.forest import CallTokens

RECORDED = FOLDER / "opencode.jsonl"
DEMO_WEIGHTS = Path(str(files("fakevllm_server.backends.embedded.demo_model") / "weights"))
NUM_SIBLINGS = 8
BUDGET = 16384
"""Tokens of one piece. In pieces of 4096, siblings with such long prompts would share nothing."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """Token ids of one recorded call."""

    prompt: list[int]
    answer: list[int] | None
    """None if no later request contains the answer."""


def recorded_sessions(file: Path = RECORDED) -> list[list[RecordedCall]]:
    """Return the calls of each session in the order they arrived, the longest session first."""
    chat: Any = import_module("fakevllm_server.backends.embedded.decode.chat_renderer")
    renderer = chat.ChatRenderer(demo_tokenizer(), "demo")
    by_session: dict[str, list[tuple[float, list[int]]]] = defaultdict(list)
    for line in expand_lines(file.read_text().splitlines()):
        body = line["body"]
        request = ChatRequest(messages=body["messages"], tools=body.get("tools"))
        prompt = renderer.render(request)
        by_session[line["headers"]["x-session-id"]].append((line["t"], prompt))
    in_order = [[prompt for _, prompt in sorted(session)] for session in by_session.values()]
    end = demo_tokenizer().eos_token_id
    return sorted((with_answers(session, end) for session in in_order), key=len, reverse=True)


def with_answers(prompts: Sequence[list[int]], end: int) -> list[RecordedCall]:
    """Return the calls of one session with their answers.

    The answer to a prompt is taken from a later prompt that begins with all tokens of this prompt.
    The answer is the tokens after the shorter prompt, up to the end token of the message. `end` is
    the id of this end token.
    """
    calls: list[RecordedCall] = []
    for index, prompt in enumerate(prompts):
        later = (other for other in prompts[index + 1 :] if other[: len(prompt)] == prompt)
        rest = next(later, prompt)[len(prompt) :]
        answer = rest[: rest.index(end) + 1] if end in rest else None
        calls.append(RecordedCall(prompt, answer))
    return calls


def shorten_prompts(session: Sequence[RecordedCall], longest: int, end: int) -> list[RecordedCall]:
    """Return the session with prompts of at most `longest` tokens.

    The end of each first message, which has the instructions and the tools, is left out. Calls with
    the same first message lose the same tokens. All other messages are kept, even if they alone are
    longer than `longest`.
    """
    num_after_first: dict[tuple[int, ...], int] = defaultdict(int)
    firsts = [tuple(call.prompt[: call.prompt.index(end)]) for call in session]
    for first, call in zip(firsts, session, strict=True):
        num_after_first[first] = max(num_after_first[first], len(call.prompt) - len(first))
    return [
        RecordedCall(
            [*first[: max(1, longest - num_after_first[first])], *call.prompt[len(first) :]],
            call.answer,
        )
        for first, call in zip(firsts, session, strict=True)
    ]


def with_siblings(name: str, session: Sequence[RecordedCall], budget: int) -> Case:
    """Return a case in which the first sibling of each call has the recorded answer."""
    chance = random.Random(0)
    answers = [call.answer for call in session if call.answer is not None]
    usual_length = int(statistics.median(map(len, answers)))
    calls: list[CallTokens] = []
    for call in session:
        answer = call.answer or random_ids(chance, usual_length)
        others = [random_ids(chance, len(answer)) for _ in range(NUM_SIBLINGS - 1)]
        calls += [CallTokens.of(call.prompt, each) for each in (answer, *others)]
    return Case(name, calls, budget, NUM_SIBLINGS)


def session_cases(longest: int | None, file: Path = RECORDED) -> list[Case]:
    """Return a case for each recorded session that has at least one answer.

    `longest` bounds the prompts in tokens. None keeps them whole.
    """
    end = demo_tokenizer().eos_token_id
    cases: list[Case] = []
    for number, session in enumerate(recorded_sessions(file), 1):
        if all(call.answer is None for call in session):
            continue
        kept = session if longest is None else shorten_prompts(session, longest, end)
        before, after = (max(len(call.prompt) for call in calls) for calls in (session, kept))
        lengths = f"prompts to {after}" if after == before else f"prompts to {after} of {before}"
        name = f"opencode {number}: {len(kept)} calls, {lengths}, N{NUM_SIBLINGS}"
        cases.append(with_siblings(name, kept, max(BUDGET, 2 * after)))
    return cases


def demo_tokenizer() -> Any:
    """Return the demo's tokenizer without a limit of length."""
    transformers: Any = import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_WEIGHTS)
    # transformers would warn about prompts beyond the demo's own limit.
    tokenizer.model_max_length = 1 << 20
    return tokenizer
