"""Writes docs/differences.md from the table in known.py:

python -m tests.differential.table
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.differential.corpus import corpus
from tests.differential.engines import WAYS
from tests.differential.known import KNOWN, Known
from tests.openapi import known as generated

FILE = Path(__file__).parents[2] / "docs" / "differences.md"

HEAD = """# What differs from a vLLM

`tests/differential` asks a real `vllm serve` {num} questions ({formats}), each three times:
directly, through proxy and server with one sibling, and with four. The reasoning ones go to a model
that thinks, behind `--reasoning-parser qwen3`. Status, headers, the keys of bodies and their order,
nulls, error bodies byte for byte and the grammar of streams are the same, and so are the sampled
texts, but for what stands here. The test fails where something else differs, and where something
that stands here does not.

Never compared: `date` and lengths; the hex digits of ids (their prefix, length and identity are);
the values of times and logprobs; `cached_tokens`, which what was asked before decides (behind the
proxy Responses tell 0 unless vLLM is started with `--enable-prompt-tokens-details`); how many
tokens one chunk of a stream holds, which is chance at vLLM too, and with it whether the logprob of
a token that a parser takes out (`</think>`) is told where no ids are asked for; comments and pings
in streams.

| what | why | requests |
|---|---|---|
"""
GENERATED = """
`tests/openapi` asks the same three whatever vLLM's own OpenAPI document lets schemathesis make up.
Statuses, media types and error bodies are the same there, but for these:

| what | why |
|---|---|
"""
FOOT = """
This page is written by `python -m tests.differential.table`.
"""


def page() -> str:
    counts = Counter(name.partition(":")[0] for name in corpus())
    formats = ", ".join(f"{count} {format}" for format, count in sorted(counts.items()))
    head = HEAD.format(num=len(corpus()), formats=formats)
    found = "".join(f"| {_cell(one.what)} | {_cell(one.why)} |\n" for one in generated.KNOWN)
    return head + "".join(map(_row, KNOWN)) + GENERATED + found + FOOT


def _row(entry: Known) -> str:
    names = [name for name in corpus() if any(entry.covers(name, way) for way in WAYS)]
    told = "; ".join(f"`{name}`" for name in names[:NUM_NAMED])
    if len(names) > NUM_NAMED:
        told += f" and {len(names) - NUM_NAMED} more"
    if len(entry.ways) < len(WAYS):
        told += f" (with {', '.join(entry.ways)} only)"
    cells = (_cell(text) for text in (entry.what, entry.why, told))
    return f"| {' | '.join(cells)} |\n"


NUM_NAMED = 6


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    FILE.write_text(page())
