"""Train a model from nothing on the made-up tasks, and save it as a Hugging Face folder.

    python -m benchmarks.gpu_learn_parts.pretraining --size tiny --device cpu --out FOLDER

Half of the replies in the training data are wrong. Therefore the model has the right form, and
often samples wrong answers, which reinforcement learning can improve. No network is needed: the
tokenizer is trained here, too.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.gpu_learn_parts.sizes import SIZES, ModelShape, Pretraining
from benchmarks.gpu_learn_parts.tasks import TOOLS, TaskKind, random_questions
from fakevllm_server.backends.embedded.demo_model import make

CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"
WRONG_SHARE = 0.5
MAX_POSITIONS = 512
TEXTS_PER_KIND = 4000
"""Number of random questions of each kind on which the tokenizer is trained."""
READABLE = ("<tool_call>", "</tool_call>")
"""Special tokens that are decoded as text, because the engine finds tool calls in the text."""
MARKER = "QUESTION"
WARM_UP_STEPS = 30
LAST_LR_SHARE = 0.1
REPORT_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class PretrainedModel:
    """Figures of a model that was trained from nothing."""

    parameters: int
    steps: int
    replies: int
    """Number of replies on which the model was trained."""
    loss: float
    """Loss of the last steps: the mean per token of the replies, in nats."""
    seconds: float


class BatchSource:
    """A source of training batches. All rows of a batch are of one kind of task, because rows of
    similar lengths need little padding."""

    def __init__(
        self, kinds: Sequence[TaskKind], tokenizer: PreTrainedTokenizerFast, max_tokens: int
    ) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(0)
        self._questions = [random_questions(kind, self._rng) for kind in kinds]
        self._frames = [_prompt_frame(tokenizer, kind) for kind in kinds]
        self._num_rows = [self._rows_that_fit(index, max_tokens) for index in range(len(kinds))]

    def _rows_that_fit(self, index: int, max_tokens: int) -> int:
        longest = max(len(prompt) + len(reply) for prompt, reply in self._token_ids(index, 64))
        return max(1, max_tokens // longest)

    def batch(self, step: int) -> list[tuple[list[int], list[int]]]:
        """Return the rows of a step as token ids of prompt and reply."""
        index = step % len(self._questions)
        return self._token_ids(index, self._num_rows[index])

    def _token_ids(self, index: int, num_rows: int) -> list[tuple[list[int], list[int]]]:
        before, after = self._frames[index]
        prompts: list[str] = []
        replies: list[str] = []
        for _ in range(num_rows):
            question = next(self._questions[index])
            prompts.append(before + question.text + after)
            is_wrong = self._rng.random() < WRONG_SHARE
            replies.append(question.wrong if is_wrong else question.right)
        encode: Any = self._tokenizer
        prompt_ids = encode(prompts, add_special_tokens=False)["input_ids"]
        reply_ids = encode(replies, add_special_tokens=False)["input_ids"]
        ends = [[*reply, make.EOS_ID] for reply in reply_ids]
        return list(zip(prompt_ids, ends, strict=True))


def _prompt_frame(tokenizer: PreTrainedTokenizerFast, kind: TaskKind) -> tuple[str, str]:
    """Return the text of a prompt before and after the question. The chat template is rendered only
    once, because rendering takes longer than a step of the training of a tiny model."""
    text: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARKER}],
        tools=list(kind.tools) or None,
        tokenize=False,
        add_generation_prompt=True,
    )
    before, after = text.split(MARKER)
    return before, after


def make_tokenizer(kinds: Sequence[TaskKind], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = make.make_tokenizer(_texts(kinds), vocab_size, MAX_POSITIONS, readable=READABLE)
    tokenizer.chat_template = CHAT_TEMPLATE.read_text()
    return tokenizer


def _texts(kinds: Sequence[TaskKind]) -> Iterator[str]:
    rng = random.Random(0)
    for kind in kinds:
        source = random_questions(kind, rng)
        for _ in range(TEXTS_PER_KIND):
            question = next(source)
            yield from (question.text, question.right)
    tools = " ".join(f"{tool['function']['name']}(item, count, hour, minute)" for tool in TOOLS)
    yield from ["user\n", "assistant\n", f"system\nTools: {tools}"] * TEXTS_PER_KIND


def make_model(shape: ModelShape, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=make.EOS_ID,
        pad_token_id=make.PAD_ID,
    )
    return Qwen3ForCausalLM(config)


def train(
    model: Qwen3ForCausalLM, source: BatchSource, plan: Pretraining, device: torch.device
) -> PretrainedModel:
    """Train the model with supervised learning, and return the figures of the training."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.01
    )
    is_cuda = device.type == "cuda"
    precision = torch.autocast("cuda", torch.bfloat16) if is_cuda else nullcontext()
    started = reported = time.monotonic()
    step, num_replies, loss, recent = 0, 0, torch.zeros((), device=device), 0.0
    while (elapsed_s := time.monotonic() - started) < plan.limit_s and step < plan.num_steps:
        progress = max(elapsed_s / plan.limit_s, step / plan.num_steps)
        warm_up = min(1.0, (step + 1) / WARM_UP_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = plan.lr * warm_up * (1 - (1 - LAST_LR_SHARE) * progress)
        rows = source.batch(step)
        with precision:
            loss = reply_loss(model, rows, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step, num_replies = step + 1, num_replies + len(rows)
        if step % 3 == 0 and time.monotonic() - reported > REPORT_EVERY_S:
            reported, recent = time.monotonic(), loss.item()
            print(f"step {step}: {reported - started:.0f} s, loss {recent:.3f}", flush=True)
    seconds = round(time.monotonic() - started, 1)
    size = sum(parameter.numel() for parameter in model.parameters())
    return PretrainedModel(size, step, num_replies, round(loss.item(), 4), seconds)


def reply_loss(
    model: Qwen3ForCausalLM, rows: Sequence[tuple[list[int], list[int]]], device: torch.device
) -> torch.Tensor:
    """Return the mean loss per token of the replies."""
    longest = max(len(prompt) + len(reply) for prompt, reply in rows)
    ids = torch.tensor([_padded([*prompt, *reply], longest, make.PAD_ID) for prompt, reply in rows])
    labels = torch.tensor(
        [_padded([-100] * len(prompt) + reply, longest, -100) for prompt, reply in rows]
    )
    # The padding is on the right, so that no other token attends to it, and no mask is needed.
    logits = model(input_ids=ids.to(device)).logits[:, :-1]
    wanted = labels[:, 1:].to(device)
    return F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten(), ignore_index=-100)


def _padded(row: list[int], length: int, value: int) -> list[int]:
    return row + [value] * (length - len(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--json", type=Path, required=True, help="file for the figures")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    size, device = SIZES[options.size], torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # more threads are slower on cores that others use
    else:  # on an H200 with torch 2.11, cuDNN's kernel has failed in a backward pass
        torch.backends.cuda.enable_cudnn_sdp(False)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(size.kinds, size.model.vocab)
    model: Any = make_model(size.model, tokenizer)
    model.to(device)
    source = BatchSource(size.kinds, tokenizer, size.pretraining.batch_tokens)
    figures = train(model, source, size.pretraining, device)
    make.write(model.to("cpu"), tokenizer, options.out)
    options.json.write_text(json.dumps(asdict(figures), indent=1))
    print(f"wrote {options.out}: {figures}")


if __name__ == "__main__":
    main()
