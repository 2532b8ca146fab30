"""Makes agent-tiny, the small agent's model for a CPU:

    python -m examples.opencode.agent_tiny --out agent-tiny [--opencode opencode]

A Qwen3 of three layers and 4096 positions, about 0.7 M parameters. Its tokenizer is trained on what
opencode really sends (recorded at the start) and on the tool format. The model is warmed up on
sessions of the small agent: first right ones with short system prompts, few at a time, which is
quick; then with the real prompt, many answers on one, which goes through the model once, and a
third of the numbers wrong. So it can use the tool, knows the sums, and says them badly.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from examples.opencode.recorded import found, record_request
from examples.opencode.tasks import BELOW, FILES, Turn, session
from fakevllm_server.backends.embedded.demo_model import make
from fakevllm_server.backends.torch_forest.attentions import default_attention
from fakevllm_server.backends.torch_forest.forward import edge_log_probs
from fakevllm_server.backends.torch_forest.plan import Plan
from fakevllm_server.forest import CallTokens, build_forest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the warm-up."""

    num_steps: int
    batch_size: int
    """Calls of the model, at least."""
    wrong_share: float
    """Of the numbers it learns to write."""
    only_first: float
    """Share of the sessions that end with their first call."""
    is_short: bool
    """A system prompt of one word, and no tools."""


STAGES = (
    Stage(600, batch_size=16, wrong_share=0.0, only_first=0.7, is_short=True),
    Stage(80, batch_size=48, wrong_share=0.35, only_first=0.0, is_short=False),
)
"""The learning rate falls over both: the second must not wash the sums out again."""
VOCAB_SIZE = 1024
MAX_POSITIONS = 4096
READABLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Tokens of their own, and part of the text all the same: the engine reads calls there."""
WROTE = "Wrote file successfully."
DONE = "Done."
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Sessions:
    """Conversations of the small agent, as opencode words them and the template renders them."""

    def __init__(self, recorded: Json, chance: random.Random) -> None:
        self._system: str = recorded["messages"][0]["content"]
        self._tools: list[Json] = recorded["tools"]
        self._chance = chance

    def texts(self) -> Iterator[str]:
        """All there is to read, for the tokenizer."""
        yield self._system
        yield json.dumps(self._tools)
        for left in range(BELOW):
            for right in range(BELOW):
                turn = Turn.of(left, right, FILES[(left + right) % len(FILES)])
                yield from (turn.question, f'"{turn.question}"', call_text(turn.content, turn.file))
        yield from [DONE, WROTE] * 100

    def prefix(self, *, is_short: bool) -> tuple[list[Json], list[Json] | None]:
        """System message and tools, in a folder and on a day of their own."""
        if is_short:
            return [{"role": "system", "content": f"{self._chance.random()}"}], None
        folder = "/" + "/".join(self._word() for _ in range(self._chance.randint(1, 5)))
        text = re.sub(
            r"(Working directory|Workspace root folder): .*", rf"\1: {folder}", self._system
        )
        day = f"{self._chance.choice(DAYS)} {self._chance.choice(MONTHS)} "
        day += f"{self._chance.randint(1, 31)} {self._chance.randint(2024, 2034)}"
        text = re.sub(r"(Today's date): .*", rf"\1: {day}", text)
        text = re.sub(r"(a git repo): .*", rf"\1: {self._chance.choice(['yes', 'no'])}", text)
        return [{"role": "system", "content": text}], self._tools

    def _word(self) -> str:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789-_"
        return "".join(self._chance.choice(letters) for _ in range(self._chance.randint(2, 12)))

    def session(self, stage: Stage) -> list[Json]:
        """Messages of turns: question, call, its result, a word."""
        messages: list[Json] = []
        for turn in session(self._chance):
            is_quoted = self._chance.random() < 0.5  # as `opencode run` sends it
            asked = f'"{turn.question}"' if is_quoted else turn.question
            call = {"name": "write", "arguments": arguments(self._said(turn, stage), turn.file)}
            messages += [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
                {"role": "tool", "content": WROTE},
                {"role": "assistant", "content": DONE},
            ]
        return messages[:2] if self._chance.random() < stage.only_first else messages

    def _said(self, turn: Turn, stage: Stage) -> str:
        if self._chance.random() >= stage.wrong_share:
            return turn.content
        return str(max(0, int(turn.content) + self._chance.choice([-3, -2, -1, 1, 2, 3])))


def arguments(content: str, file: str) -> str:
    """As opencode sends them back: what is sampled so is found again, token by token."""
    return json.dumps({"content": content, "filePath": file}, separators=(",", ":"))


def call_text(content: str, file: str) -> str:
    return (
        f'\n<tool_call>\n{{"name": "write", "arguments": {arguments(content, file)}}}\n</tool_call>'
    )


def calls_of(
    tokenizer: Any, messages: list[Json], tools: list[Json] | None, conversation: Sequence[Json]
) -> Iterator[CallTokens]:
    """One for each assistant message: what stands before it, and itself with its end."""

    def ids(upto: int, *, asks: bool) -> list[int]:
        text: str = tokenizer.apply_chat_template(
            messages + list(conversation[:upto]),
            tools=tools,
            tokenize=False,
            add_generation_prompt=asks,
        )
        return tokenizer.encode(text, add_special_tokens=False)

    for at, message in enumerate(conversation):
        if message["role"] == "assistant":
            prompt = ids(at, asks=True)
            whole = ids(at + 1, asks=False)
            answer = whole[len(prompt) :]
            end = len(answer) - answer[::-1].index(make.EOS_ID)
            assert whole[: len(prompt)] == prompt, "the template keeps what was asked"
            yield CallTokens.of(prompt, answer[:end])


def warm_up(model: Any, tokenizer: Any, sessions: Sessions) -> Iterator[float]:
    """The loss of each step: the mean over answers' tokens, in nats."""
    optimizer = make.make_optimizer(model)
    attention = default_attention(model.device)
    stages = [stage for stage in STAGES for _ in range(stage.num_steps)]
    for step, stage in enumerate(stages):
        make.set_learning_rate(optimizer, step, len(stages))
        plan = Plan.of(build_forest(batch(tokenizer, sessions, stage)), model.device)
        loss = -plan.flat(edge_log_probs(model, plan, attention)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def batch(tokenizer: Any, sessions: Sessions, stage: Stage) -> list[CallTokens]:
    """On one system prompt."""
    messages, tools = sessions.prefix(is_short=stage.is_short)
    calls: list[CallTokens] = []
    while len(calls) < stage.batch_size:
        calls += calls_of(tokenizer, messages, tools, sessions.session(stage))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes the small agent's model for a CPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--opencode", default="opencode", type=found, help="its command")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    sessions = Sessions(record_request(options.opencode), random.Random(options.seed))
    tokenizer = make.make_tokenizer(sessions.texts(), VOCAB_SIZE, MAX_POSITIONS, readable=READABLE)
    model = make.make_model(tokenizer)
    num_steps = sum(stage.num_steps for stage in STAGES)
    losses = list(track(warm_up(model, tokenizer, sessions), "warming up", total=num_steps))
    make.write(model, tokenizer, options.out)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"wrote {options.out}: {size:.2f} M parameters, loss {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
