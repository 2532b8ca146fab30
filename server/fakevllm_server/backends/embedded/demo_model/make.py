"""Create the language model of the command `fakevllm demo`.

    python -m fakevllm_server.backends.embedded.demo_model.make --out DIR

The model is a Qwen3 with three layers. The replies in its training data have the right form, but
half of them contain a wrong sum. Therefore the trained model often samples wrong answers, which
reinforcement learning can improve. Some training prompts are not sums but random text, so that the
model's replies are short and well formed for any prompt. The seed is fixed, and torch uses one
thread. Therefore repeated runs on one machine with one torch version give the same weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from fakevllm_adapters.vllm_compat.chat_request import ChatRequest
from fakevllm_server.backends.embedded.demo_model.sums import Sum, prompt_text, random_sum
from fakevllm_server.backends.embedded.engine import EmbeddedEngine, EngineConfig
from fakevllm_server.types.sampling import Sampling

NUM_STEPS = 1000
"""Number of training steps. A time limit instead would give a different model on a slow machine.
With fewer steps, the model's greedy answers are not yet right, and its reinforcement learning in
the demo is slow."""
BATCH_SIZE = 64
WRONG_SHARE = 0.5
PEAK_LR = 2e-3
CHATTER_EVERY = 8
"""One batch in this many contains text other than sums. More such batches would make the model
worse at sums."""
CHATTER_BATCH_SIZE = 8
MAX_CHATTER_WORDS = 80
SYSTEM_EVERY = 8
"""One batch in this many has a system prompt, because some apps send a system prompt."""
MAX_POSITIONS = 512
VOCAB_SIZE = 512

SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
]
EOS_ID, PAD_ID = SPECIALS.index("<|im_end|>"), SPECIALS.index("<|endoftext|>")
"""Ids of two special tokens. The tokenizer's trainer numbers the special tokens first."""
WORDS = """
the of to and a in is it he she they was for on are with as his her at be this have from or had by
if how many much does did what there each every all their will when who than then total number
cost costs day days week hours minutes buys bought sells sold eats makes made gives gave has left
more less half twice times dollars money per one two three four five six ten apples eggs books
pencils students friends house school store price John Mary Tom Anna takes needs wants spends
earns away after before same first second year month old water
""".split()  # noqa: SIM905 - a literal list would be a hundred lines
SYSTEM_PROMPTS = [
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer in one short sentence.",
    "You are a math tutor.",
    "You are a careful calculator. Give the answer and no more.",
    "Answer the question.",
    "Be brief and polite.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer(_tokenizer_corpus(), VOCAB_SIZE, MAX_POSITIONS)
    model = make_model(tokenizer)
    for step, loss in enumerate(
        warm_up(model, tokenizer, options.steps, random.Random(options.seed)), start=1
    ):
        if step % 20 == 0:
            print(f"step {step:4d}  loss {loss:.3f}", flush=True)
    write(model, tokenizer, options.out)
    print(
        f"wrote {options.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters"
    )
    engine = EmbeddedEngine(EngineConfig(options.out, "demo"))
    sampled = asyncio.run(success_rate(engine, Sampling(max_tokens=24)))
    greedy = asyncio.run(success_rate(engine, Sampling(max_tokens=24, temperature=0)))
    print(f"sums solved: {sampled:.2f} sampled, {greedy:.2f} greedy")
    engine.close()


def make_tokenizer(
    texts: Iterator[str], vocab_size: int, max_positions: int, *, readable: Collection[str] = ()
) -> PreTrainedTokenizerFast:
    """Train and return a byte-level BPE tokenizer for strings like `texts`. Encoding and decoding a
    UTF-8 text gives the same text. `readable` is a subset of the special tokens (SPECIALS). A
    decoder that skips special tokens keeps those in `readable`, and removes all others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    if readable:
        bpe = _with_readable(bpe, readable)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )
    tokenizer.chat_template = (Path(__file__).parent / "chat_template.jinja").read_text()
    return tokenizer


def _with_readable(bpe: Tokenizer, readable: Collection[str]) -> Tokenizer:
    state = json.loads(bpe.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] not in readable
    return Tokenizer.from_str(json.dumps(state))


def _tokenizer_corpus() -> Iterator[str]:
    sums = [Sum(a, b) for a in range(20) for b in range(20)]
    for _ in range(3):
        yield from ("user\n", "assistant\n", "system\n")
        yield from (sum_.question for sum_ in sums)
        yield from (reply for sum_ in sums for reply in sum_.replies(sum_.answer))
    for rank, word in enumerate(WORDS):
        yield from [f" {word}"] * (30 + 2 * (len(WORDS) - rank))


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=tokenizer.model_max_length,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen3ForCausalLM(config)


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, num_steps: int, rng: random.Random
) -> Iterator[float]:
    """Train the model with supervised learning on sums and other text. After each step, yield the
    step's loss (mean per reply token, in nats)."""
    optimizer = make_optimizer(model)
    for step in range(num_steps):
        set_learning_rate(optimizer, step, num_steps)
        loss = _reply_loss(model, tokenizer, _batch(step, rng))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


def make_optimizer(model: Qwen3ForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, num_steps: int) -> None:
    """Set the learning rate of step `step`. The schedule is a linear warm-up over 30 steps,
    combined with a linear decay over all steps to a tenth of PEAK_LR."""
    for group in optimizer.param_groups:
        group["lr"] = PEAK_LR * min(1, (step + 1) / 30) * (1 - 0.9 * step / num_steps)


def _batch(step: int, rng: random.Random) -> list[tuple[str, str]]:
    """Return the training batch of a step as a list of (prompt text, reply). The prompt text
    contains the markup of the chat template."""
    if step % CHATTER_EVERY == 0:
        pairs = [_chatter(rng) for _ in range(CHATTER_BATCH_SIZE)]
    else:
        pairs = [_sloppy_sum(rng) for _ in range(BATCH_SIZE)]
    # All rows have the same system prompt, because rows of similar lengths waste no padding.
    system = rng.choice(SYSTEM_PROMPTS) if step % SYSTEM_EVERY == SYSTEM_EVERY // 2 else None
    return [(prompt_text(question, system), reply) for question, reply in pairs]


def _sloppy_sum(rng: random.Random) -> tuple[str, str]:
    sum_ = random_sum(rng)
    answer = sum_.answer
    if rng.random() < WRONG_SHARE:
        answer = max(0, answer + rng.choice([-3, -2, -1, 1, 2, 3]))
    return sum_.question, rng.choice(sum_.replies(answer))


def _chatter(rng: random.Random) -> tuple[str, str]:
    """Return a training pair (question, reply) whose question is not a sum. The question consists
    of random words, so that it resembles a word problem. The reply states a random sum that has
    nothing to do with the question, in one of the three forms of the model's replies."""
    words = [
        str(rng.randrange(100)) if rng.random() < 0.1 else _inflected(rng)
        for _ in range(rng.randint(3, MAX_CHATTER_WORDS))
    ]
    text = " ".join(words)[0].upper() + " ".join(words)[1:] + rng.choice([".", "?", "?", "?"])
    left, right = rng.randrange(20), rng.randrange(20)
    return text, rng.choice(Sum(left, right).replies(left + right))


def _inflected(rng: random.Random) -> str:
    """Return a random word for training text: a word from WORDS, possibly with a punctuation mark,
    or a string of random letters."""
    if rng.random() < 0.6:
        return rng.choice(WORDS) + rng.choice(["", "", "", ",", "."])
    return "".join(rng.choice("aeiounrstlmcdghbpw") for _ in range(rng.randint(2, 9)))


def _reply_loss(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> torch.Tensor:
    rows: list[list[int]] = []
    prompt_lengths: list[int] = []
    for prompt_with_markup, reply in pairs:
        prompt = tokenizer.encode(prompt_with_markup, add_special_tokens=False)
        prompt_lengths.append(len(prompt))
        rows.append([*prompt, *tokenizer.encode(reply, add_special_tokens=False), EOS_ID])
    longest = max(map(len, rows))
    ids = torch.tensor([row + [PAD_ID] * (longest - len(row)) for row in rows])
    labels = ids.clone()
    for label, row, prompt_length in zip(labels, rows, prompt_lengths, strict=True):
        label[:prompt_length] = -100
        label[len(row) :] = -100
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def write(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model and the tokenizer to a folder. The weights are stored in bfloat16, so that
    they take less space in the Python package. The function also converts the weights of `model`
    itself to bfloat16."""
    shutil.rmtree(folder, ignore_errors=True)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    weights: Any = model
    weights.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


async def success_rate(engine: EmbeddedEngine, sampling: Sampling, num_sums: int = 1000) -> float:
    rng = random.Random(1)
    sums = [random_sum(rng) for _ in range(num_sums)]
    return statistics.mean(await asyncio.gather(*(_solves(engine, one, sampling) for one in sums)))


async def _solves(engine: EmbeddedEngine, one: Sum, sampling: Sampling) -> bool:
    request = ChatRequest(messages=[{"role": "user", "content": one.question}])
    ids: list[int] = []
    async for tokens in engine.generate(engine.render(request), sampling):
        ids += [token.id for token in tokens]
    return ids[-1] in engine.eos_ids and one.is_solved_by(engine.decode(ids))


if __name__ == "__main__":
    main()
