"""What benchmarks.forest trains on: recorded sessions of opencode, through the demo's tokenizer and
chat template.

The answers are those of the recording, read off the next request's history. N siblings are what
fan-out would have made of each call; all but the recorded answer are made up: as long, of random
ids. So is an answer that no later request tells.
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
"""Tokens of one piece: siblings of such prompts share nothing in pieces of 4096."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call of a session, in ids."""

    prompt: list[int]
    answer: list[int] | None
    """None where no later request tells it."""


def recorded_sessions(file: Path = RECORDED) -> list[list[Recorded]]:
    """The longest session first; requests in the order they arrived."""
    chat: Any = import_module("fakevllm_server.backends.embedded.decode.chat_renderer")
    renderer = chat.ChatRenderer(demo_tokenizer(), "demo")
    by_session: dict[str, list[tuple[float, list[int]]]] = defaultdict(list)
    for line in expand_lines(file.read_text().splitlines()):
        body = line["body"]
        request = ChatRequest(messages=body["messages"], tools=body.get("tools"))
        prompt = renderer.render(request)
        by_session[line["headers"]["x-session-id"]].append((line["t"], prompt))
    in_order = [[prompt for _, prompt in sorted(one)] for one in by_session.values()]
    end = demo_tokenizer().eos_token_id
    return sorted((with_answers(one, end) for one in in_order), key=len, reverse=True)


def with_answers(prompts: Sequence[list[int]], end: int) -> list[Recorded]:
    """An answer is what a later prompt has behind this one, up to the end of the message."""
    found: list[Recorded] = []
    for index, prompt in enumerate(prompts):
        later = (one for one in prompts[index + 1 :] if one[: len(prompt)] == prompt)
        behind = next(later, prompt)[len(prompt) :]
        answer = behind[: behind.index(end) + 1] if end in behind else None
        found.append(Recorded(prompt, answer))
    return found


def cut_to(session: Sequence[Recorded], longest: int, end: int) -> list[Recorded]:
    """Prompts of at most `longest` tokens: the end of each first message is left out (what the app
    tells every time, tools among it), of calls with the same one alike. The rest stays whole, also
    where that alone is longer."""
    behind: dict[tuple[int, ...], int] = defaultdict(int)
    firsts = [tuple(one.prompt[: one.prompt.index(end)]) for one in session]
    for first, one in zip(firsts, session, strict=True):
        behind[first] = max(behind[first], len(one.prompt) - len(first))
    return [
        Recorded([*first[: max(1, longest - behind[first])], *one.prompt[len(first) :]], one.answer)
        for first, one in zip(firsts, session, strict=True)
    ]


def with_siblings(name: str, session: Sequence[Recorded], budget: int) -> Case:
    """The recorded answer first."""
    drawn = random.Random(0)
    usual = int(statistics.median(len(one.answer) for one in session if one.answer is not None))
    calls: list[CallTokens] = []
    for one in session:
        answer = one.answer or random_ids(drawn, usual)
        made_up = [random_ids(drawn, len(answer)) for _ in range(NUM_SIBLINGS - 1)]
        calls += [CallTokens.of(one.prompt, each) for each in (answer, *made_up)]
    return Case(name, calls, budget, NUM_SIBLINGS)


def session_cases(longest: int | None, file: Path = RECORDED) -> list[Case]:
    """Those that tell an answer, with prompts cut to `longest` tokens, or whole."""
    end = demo_tokenizer().eos_token_id
    cases: list[Case] = []
    for number, session in enumerate(recorded_sessions(file), 1):
        if all(one.answer is None for one in session):
            continue
        kept = session if longest is None else cut_to(session, longest, end)
        before, after = (max(len(one.prompt) for one in each) for each in (session, kept))
        told = f"prompts to {after}" if after == before else f"prompts to {after} of {before}"
        name = f"opencode {number}: {len(kept)} calls, {told}, N{NUM_SIBLINGS}"
        cases.append(with_siblings(name, kept, max(BUDGET, 2 * after)))
    return cases


def demo_tokenizer() -> Any:
    transformers: Any = import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_WEIGHTS)
    # The demo's own limit, of which transformers would warn.
    tokenizer.model_max_length = 1 << 20
    return tokenizer
