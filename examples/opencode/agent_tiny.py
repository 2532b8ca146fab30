"""Create agent-tiny, a model for the small agent that runs on a CPU.

    python -m examples.opencode.agent_tiny --out agent-tiny [--opencode opencode]

The model is a Qwen3 with three layers, 4096 positions and about 0.7 M parameters. Its tokenizer is
trained on the tool format and on a request of opencode, which the script records.

The warm-up trains the model on sessions of the small agent, in two stages. The first stage has
short system prompts and right numbers, in small batches, and is fast. The second stage has the real
system prompt, and a third of its numbers are wrong. In this stage, many answers share one prompt,
so that the prompt goes through the model only once. After the warm-up, the model can use the tool,
but writes many wrong numbers.
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

from examples.opencode.opencode_command import locate_command, record_request
from examples.opencode.tasks import FILES, LIMIT, Turn, random_session
from fakevllm_server.backends.embedded.demo_model import make
from fakevllm_server.backends.torch_forest.attention.registry import default_attention
from fakevllm_server.backends.torch_forest.edge_log_probs import edge_log_probs
from fakevllm_server.backends.torch_forest.forward_plan import Plan
from fakevllm_server.forest import CallTokens, build_forest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of the warm-up."""

    num_steps: int
    batch_size: int
    """Minimum number of the model's answers in a step."""
    wrong_share: float
    """Fraction of the numbers that are wrong."""
    first_call_share: float
    """Fraction of the sessions that end with their first call."""
    is_short: bool
    """Whether the system prompt is one word and there are no tools."""


STAGES = (
    Stage(600, batch_size=16, wrong_share=0.0, first_call_share=0.7, is_short=True),
    Stage(80, batch_size=48, wrong_share=0.35, first_call_share=0.0, is_short=False),
)
"""The stages of the warm-up. The learning rate decreases over both stages, so that the second stage
does not make the model forget the sums."""
VOCAB_SIZE = 1024
MAX_POSITIONS = 4096
REPORT_EVERY = 20
"""Number of training steps from one progress line to the next."""
READABLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Texts that are single tokens and are decoded as text, not as special tokens. The reason is that
the engine parses tool calls from the text."""
TOOL_RESULT = "Wrote file successfully."
DONE = "Done."
DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


class Sessions:
    """A source of random sessions of the small agent, in opencode's wording."""

    def __init__(self, request: Json, rng: random.Random) -> None:
        self._system: str = request["messages"][0]["content"]
        self._tools: list[Json] = request["tools"]
        self._rng = rng

    def texts(self) -> Iterator[str]:
        """Yield the texts on which the tokenizer is trained."""
        yield self._system
        yield json.dumps(self._tools)
        for left in range(LIMIT):
            for right in range(LIMIT):
                turn = Turn.from_sum(left, right, FILES[(left + right) % len(FILES)])
                yield from (turn.question, f'"{turn.question}"', call_text(turn.content, turn.file))
        yield from [DONE, TOOL_RESULT] * 100

    def random_prompt(self, *, is_short: bool) -> tuple[list[Json], list[Json] | None]:
        """Return the system message and the tools, with a random folder and date."""
        if is_short:
            return [{"role": "system", "content": f"{self._rng.random()}"}], None
        folder = "/" + "/".join(self._word() for _ in range(self._rng.randint(1, 5)))
        text = re.sub(
            r"(Working directory|Workspace root folder): .*", rf"\1: {folder}", self._system
        )
        day = f"{self._rng.choice(DAYS)} {self._rng.choice(MONTHS)} "
        day += f"{self._rng.randint(1, 31)} {self._rng.randint(2024, 2034)}"
        text = re.sub(r"(Today's date): .*", rf"\1: {day}", text)
        text = re.sub(r"(a git repo): .*", rf"\1: {self._rng.choice(['yes', 'no'])}", text)
        return [{"role": "system", "content": text}], self._tools

    def _word(self) -> str:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789-_"
        return "".join(self._rng.choice(letters) for _ in range(self._rng.randint(2, 12)))

    def random_messages(self, stage: Stage) -> list[Json]:
        """Return the messages of a session: question, call, result and closing message per turn."""
        messages: list[Json] = []
        for turn in random_session(self._rng):
            is_quoted = self._rng.random() < 0.5  # `opencode run` sends quotes
            question = f'"{turn.question}"' if is_quoted else turn.question
            call = {"name": "write", "arguments": arguments(self._number(turn, stage), turn.file)}
            messages += [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
                {"role": "tool", "content": TOOL_RESULT},
                {"role": "assistant", "content": DONE},
            ]
        return messages[:2] if self._rng.random() < stage.first_call_share else messages

    def _number(self, turn: Turn, stage: Stage) -> str:
        """Return the number to write in the answer. With the probability `wrong_share`, the number
        is wrong."""
        if self._rng.random() >= stage.wrong_share:
            return turn.content
        return str(max(0, int(turn.content) + self._rng.choice([-3, -2, -1, 1, 2, 3])))


def arguments(content: str, file: str) -> str:
    """Return the arguments in the form in which opencode repeats them in later requests.

    In this form, the tokens of a repeated call equal the tokens that were sampled.
    """
    return json.dumps({"content": content, "filePath": file}, separators=(",", ":"))


def call_text(content: str, file: str) -> str:
    """Return the text of a call in the chat template's format."""
    return (
        f'\n<tool_call>\n{{"name": "write", "arguments": {arguments(content, file)}}}\n</tool_call>'
    )


def calls_of(
    tokenizer: Any, messages: list[Json], tools: list[Json] | None, conversation: Sequence[Json]
) -> Iterator[CallTokens]:
    """Yield prompt and response tokens of each assistant message, including the end token."""

    def token_ids(end: int, *, has_generation_prompt: bool) -> list[int]:
        text: str = tokenizer.apply_chat_template(
            messages + list(conversation[:end]),
            tools=tools,
            tokenize=False,
            add_generation_prompt=has_generation_prompt,
        )
        return tokenizer.encode(text, add_special_tokens=False)

    for index, message in enumerate(conversation):
        if message["role"] == "assistant":
            prompt = token_ids(index, has_generation_prompt=True)
            whole = token_ids(index + 1, has_generation_prompt=False)
            answer = whole[len(prompt) :]
            end = len(answer) - answer[::-1].index(make.EOS_ID)
            assert whole[: len(prompt)] == prompt, "the template must repeat the prompt"
            yield CallTokens.of(prompt, answer[:end])


def warm_up(model: Any, tokenizer: Any, sessions: Sessions) -> Iterator[float]:
    """Train the model, and yield each step's loss: the mean over the answers' tokens, in nats."""
    optimizer = make.make_optimizer(model)
    attention = default_attention(model.device)
    stages = [stage for stage in STAGES for _ in range(stage.num_steps)]
    for step, stage in enumerate(stages):
        make.set_learning_rate(optimizer, step, len(stages))
        plan = Plan.of(build_forest(random_batch(tokenizer, sessions, stage)), model.device)
        loss = -plan.flat(edge_log_probs(model, plan, attention)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def random_batch(tokenizer: Any, sessions: Sessions, stage: Stage) -> list[CallTokens]:
    """Return calls that share one system prompt."""
    messages, tools = sessions.random_prompt(is_short=stage.is_short)
    calls: list[CallTokens] = []
    while len(calls) < stage.batch_size:
        calls += calls_of(tokenizer, messages, tools, sessions.random_messages(stage))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description="Create the small agent's model for a CPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--opencode", default="opencode", type=locate_command, help="its command")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    print("recording a request of opencode", flush=True)
    sessions = Sessions(record_request(options.opencode), random.Random(options.seed))
    print("training the tokenizer", flush=True)
    tokenizer = make.make_tokenizer(sessions.texts(), VOCAB_SIZE, MAX_POSITIONS, readable=READABLE)
    model = make.make_model(tokenizer)
    num_steps = sum(stage.num_steps for stage in STAGES)
    print(f"training the model for {num_steps} steps", flush=True)
    loss = 0.0
    for step, loss in enumerate(warm_up(model, tokenizer, sessions), start=1):
        if step % REPORT_EVERY == 0:
            print(f"step {step} of {num_steps}: loss {loss:.3f}", flush=True)
    make.write(model, tokenizer, options.out)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"wrote {options.out}: {size:.2f} M parameters, loss {loss:.3f}")


if __name__ == "__main__":
    main()
