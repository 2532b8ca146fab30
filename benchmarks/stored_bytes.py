"""Measure how many bytes ledger and journal store for a session, compared with its content.

    python -m benchmarks.stored_bytes [--turns 8] [--siblings 8] [--prompt 22000] [--write]

A session has a system prompt of 22,000 tokens and eight turns. Each turn adds a question of 200
tokens, and its eight siblings answer with 150 tokens each. The served answer becomes a part of the
next prompt. The ledger and the journal are written as proxy and server write them. The journal is
measured before its calls are deleted. The size of an empty file is subtracted from each file's
size. The size of the content counts each distinct token once, as an int32, and each distinct text
once, in UTF-8.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.results import conditions, markdown_table, replace_section
from fakevllm.ledger.records import GroupRecord, SiblingRecord
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.packed_numbers import pack_floats, pack_ids
from fakevllm_adapters.protocol.swarm import CapturedCall
from fakevllm_server.journal import row_changes
from fakevllm_server.journal.rows import PooledGroup, ScoredSample, Submission
from fakevllm_server.journal.store import Journal
from fakevllm_server.journal.tables import GroupState
from fakevllm_server.types.calls import RecordedCall, VersionSpan

TITLE = "stored_bytes"
GOAL = 1.3
NUM_WORDS = 20_000
QUESTION_TOKENS = 200
ANSWER_TOKENS = 150
HEADER = ("", "bytes", "times the content")


class Words:
    """Random texts. A token is one word, and words are as frequent as in a language (Zipf)."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        letters = "etaoinshrdlucmfwypvbgk"
        weights = range(len(letters), 0, -1)
        self._words = [
            " " + "".join(self._random.choices(letters, weights, k=self._random.randint(1, 7)))
            for _ in range(NUM_WORDS)
        ]
        self._frequencies = [1 / (rank + 3) for rank in range(NUM_WORDS)]
        self._ids = self._random.sample(range(150_000), NUM_WORDS)

    def sample(self, num_tokens: int) -> tuple[str, list[int]]:
        """Return a text and its token ids."""
        chosen = self._random.choices(range(NUM_WORDS), self._frequencies, k=num_tokens)
        return "".join(self._words[at] for at in chosen), [self._ids[at] for at in chosen]

    def logprobs(self, num_tokens: int) -> list[float]:
        """Return log-probabilities that float32 represents exactly, as an engine reports them."""
        numbers = (-self._random.expovariate(2.0) for _ in range(num_tokens))
        return array("f", numbers).tolist()


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request with the answers of its siblings. The first answer is served."""

    messages: list[dict[str, str]]
    prompt_ids: list[int]
    answers: list[Answer]


def make_session(num_turns: int, num_siblings: int, prompt_tokens: int) -> list[Turn]:
    """Return the turns of a session."""
    words = Words()
    system, ids = words.sample(prompt_tokens)
    messages = [{"role": "system", "content": system}]
    turns: list[Turn] = []
    for _ in range(num_turns):
        question, question_ids = words.sample(QUESTION_TOKENS)
        messages = [*messages, {"role": "user", "content": question}]
        ids = [*ids, *question_ids]
        sampled = [words.sample(ANSWER_TOKENS) for _ in range(num_siblings)]
        answers = [Answer(text, own, words.logprobs(len(own))) for text, own in sampled]
        turns.append(Turn(messages, ids, answers))
        messages = [*messages, {"role": "assistant", "content": answers[0].text}]
        ids = [*ids, *answers[0].ids]
    return turns


def content_bytes(turns: Sequence[Turn]) -> tuple[int, int, int]:
    """Return the bytes of the distinct tokens and of the distinct texts of a session, and of the
    log-probabilities in float32."""
    others = [answer for turn in turns for answer in turn.answers[1:]]
    kept = [*others, turns[-1].answers[0]]
    num_tokens = len(turns[-1].prompt_ids) + sum(len(answer.ids) for answer in kept)
    texts = [message["content"] for message in turns[-1].messages]
    num_bytes = sum(len(text.encode()) for text in [*texts, *(answer.text for answer in kept)])
    num_sampled = sum(len(answer.ids) for turn in turns for answer in turn.answers)
    return 4 * num_tokens, num_bytes, 4 * num_sampled


def write_ledger(path: Path, turns: Sequence[Turn]) -> float:
    """Write the session as a proxy does. Return the seconds."""
    ledger = Ledger.open(path)
    started_at = time.monotonic()
    for number, turn in enumerate(turns):
        ledger.record(_group_record(number, turn))
        calls = [[_captured_call(turn, answer)] for answer in turn.answers]
        ledger.settle(f"{number:032x}", "pooled", None, 1, calls, "run", "job")
        assert ledger.drain()
    seconds = time.monotonic() - started_at
    assert ledger.health.dropped == 0
    ledger.close()
    return seconds


def _group_record(number: int, turn: Turn) -> GroupRecord:
    siblings = [
        SiblingRecord(
            index=index,
            served=index == 0,
            best=index == 0,
            status=200,
            message_json=json.dumps({"role": "assistant", "content": answer.text}),
            text=answer.text,
            finish_reason="stop",
            prompt_tokens=len(turn.prompt_ids),
            completion_tokens=len(answer.ids),
            reward=index / 8,
        )
        for index, answer in enumerate(turn.answers)
    ]
    body = {"model": "model", "messages": turn.messages, "stream": True}
    return GroupRecord(
        group_id=f"{number:032x}",
        received_at=float(number),
        route="/v1/chat/completions",
        model="model",
        streamed=True,
        task_id=None,
        app_key=None,
        request_json=json.dumps(body),
        question=turn.messages[-1]["content"],
        num_siblings=len(siblings),
        status=200,
        latency_s=1.0,
        served_index=0,
        best_index=0,
        state="scored",
        reason=None,
        hook_hash="9f86d081884c7d65",
        siblings=siblings,
        session_id="s" * 32,
        parent_id=f"{number - 1:032x}" if number else None,
        turn=number + 1,
        kind="continues",
        evidence="prefix",
        asked_key=f"{number:032x}",
    )


def _captured_call(turn: Turn, answer: Answer) -> CapturedCall:
    return CapturedCall(
        prompt_ids=pack_ids(turn.prompt_ids),
        response_ids=pack_ids(answer.ids),
        logprobs=pack_floats(answer.logprobs),
        weight_versions=[[1, 0, len(answer.ids)]],
        temperature=1.0,
        finish_reason="stop",
    )


def write_journal(path: Path, turns: Sequence[Turn]) -> float:
    """Write the calls and the groups as a server does. Return the seconds."""
    journal = Journal(path)
    started_at = time.monotonic()
    for number, turn in enumerate(turns):
        group_id = f"{number:032x}"
        samples: list[ScoredSample] = []
        for index, answer in enumerate(turn.answers):
            call = RecordedCall(
                prompt_ids=turn.prompt_ids,
                response_ids=answer.ids,
                logprobs=answer.logprobs,
                versions=[VersionSpan(1, 0, len(answer.ids))],
                temperature=1.0,
                finish_reason="stop",
                untrainable=None,
            )
            owner = f"{group_id}/{index}"
            journal.put(row_changes.call_recorded(owner, 0, call, group_id))
            samples.append(ScoredSample(owner, index, index / 8))
        pooled = PooledGroup(group_id, GroupState.POOLED)
        submission = Submission(f"group:{group_id}", b"x" * 16, '{"state":"pooled","step":1}')
        journal.put(row_changes.group_ended(pooled, samples, submission))
        assert journal.drain()
    seconds = time.monotonic() - started_at
    journal.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=22_000, help="tokens of the system prompt")
    parser.add_argument("--write", action="store_true", help="put the table into RESULTS.md")
    args = parser.parse_args()
    text = conditions()
    turns = make_session(args.turns, args.siblings, args.prompt)
    with tempfile.TemporaryDirectory() as folder:
        ledger, journal = Path(folder) / "ledger.sqlite", Path(folder) / "journal.sqlite"
        write_ledger(ledger, [])
        write_journal(journal, [])
        empty = (ledger.stat().st_size, journal.stat().st_size)
        seconds = (write_ledger(ledger, turns), write_journal(journal, turns))
        sizes = (ledger.stat().st_size - empty[0], journal.stat().st_size - empty[1])
    token_bytes, text_bytes, logprob_bytes = content_bytes(turns)
    content = token_bytes + text_bytes
    rows = [
        ("distinct tokens", token_bytes),
        ("distinct texts", text_bytes),
        ("log-probabilities of the sampled tokens", logprob_bytes),
        ("ledger", sizes[0]),
        ("journal", sizes[1]),
        ("ledger + journal", sum(sizes)),
    ]
    lines = [(name, f"{size:,}", f"{size / content:.2f}") for name, size in rows]
    table = Table(*HEADER)
    for line in lines:
        table.add_row(*line)
    Console(width=100).print(table)
    summary = (
        f"{args.turns} turns, {args.siblings} siblings, a system prompt of {args.prompt:,} tokens. "
        f"Ledger and journal have {sum(sizes) / content:.2f} times the bytes of the distinct "
        f"tokens and texts, and {sum(sizes) / (content + logprob_bytes):.2f} times if the "
        f"log-probabilities are counted as content too. The goal is {GOAL}. Writing took "
        f"{1000 * seconds[0] / args.turns:.0f} ms a turn in the ledger and "
        f"{1000 * seconds[1] / args.turns:.0f} ms in the journal."
    )
    print(summary)
    if args.write:
        replace_section(TITLE, f"{text}\n{markdown_table(HEADER, lines)}\n{summary}")


if __name__ == "__main__":
    main()
