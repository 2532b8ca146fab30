"""Made-up secrets, the requests that carry them, and the search for them in the files of a run."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from fakevllm_adapters.privacy.patterns import has_check_digit
from fakevllm_server.journal.compression import decompress_facts, decompress_numbers

Json = dict[str, Any]
MAX_PATTERN_BYTES = 2**31
"""Maximum size of the automaton with which RE2 searches 10,000 secrets."""

REDACTING = """
[job]
batch_size = 2
lr = 0.1

[privacy]
redact = ["email", "phone", "card", "api_key"]

[privacy.patterns]
customer = 'K-[0-9]{8}'
"""
HOOK = """
import sys

def on_compute_relative_reward(valid_results, all_answers):
    texts = [str(answer) for answer in all_answers]
    if "raise" in str(valid_results) + "".join(texts):
        raise ValueError("cannot score " + "".join(texts))
    return [float(len(text) % 7) for text in texts]
"""


def secrets(num: int, seed: int) -> list[str]:
    """Return `num` different secrets of all kinds."""
    rng = random.Random(seed)

    def digits(count: int) -> str:
        return "".join(rng.choice("0123456789") for _ in range(count))

    def letters(count: int) -> str:
        return "".join(rng.choice("abcdefghijkmnpqrstuvwxyz") for _ in range(count))

    def card(number: int) -> str:
        first = f"4{digits(6)}{number:08}"
        return next(first + end for end in "0123456789" if has_check_digit(first + end))

    def secret(number: int) -> str:
        match number % 5:
            case 0:
                return f"{letters(6)}{number}@{letters(5)}.example"
            case 1:
                return f"+49 30 {10_000_000 + number}"
            case 2:
                return card(number)
            case 3:
                return f"sk-{letters(20)}{number}"
            case _:
                return f"K-{number:08}"

    return [secret(number) for number in range(num)]


def _chat(content: Any, **fields: Any) -> tuple[str, Json]:
    return "/v1/chat/completions", {
        "model": "fake",
        "messages": [{"role": "user", "content": content}],
    } | fields


def _spread(secret: str) -> list[Json]:
    half = len(secret) // 2
    return [{"type": "text", "text": part} for part in (secret[:half], secret[half:])]


def _requests(secret: str) -> Iterator[tuple[str, Json]]:
    """Yield requests that have the secret in different places, also in the answer."""
    say = f"[[say it is {secret} ]]"
    arguments = json.dumps({"value": secret, "note": secret})
    tools = [{"type": "function", "function": {"name": "save", "parameters": {"type": "object"}}}]
    yield _chat(say)
    yield _chat(say, stream=True)
    yield _chat("yes or no?", user=secret, metadata={"session_id": secret})
    yield _chat(_spread(secret))
    yield _chat(f"[[call save {arguments}]]", tools=tools)
    yield _chat(f"[[call save {arguments}]]", tools=tools, stream=True)
    yield _chat(f"raise [[say {secret}]]")
    yield _chat("yes?", model=f"unknown {secret}")
    yield _chat("yes?", temperature=secret)
    yield (
        "/v1/chat/completions",
        {
            "model": "fake",
            "messages": [
                {"role": "system", "content": f"Never say {secret}."},
                {"role": "user", "content": "yes?"},
                {"role": "assistant", "content": "yes", "reasoning": secret},
                {"role": "user", "content": "no?"},
            ],
        },
    )
    yield "/v1/completions", {"model": "fake", "prompt": say, "max_tokens": 60}
    yield "/v1/completions", {"model": "fake", "prompt": list(secret.encode()), "max_tokens": 4}
    yield "/v1/responses", {"model": "fake", "input": say, "instructions": secret}
    yield "/v1/responses", {"model": "fake", "input": say, "stream": True}
    yield (
        "/v1/messages",
        {
            "model": "fake",
            "max_tokens": 60,
            "system": secret,
            "messages": [{"role": "user", "content": say}],
        },
    )


def escaped(secret: str) -> str:
    """Return the secret with each character as an escape of JSON."""
    return "".join(f"\\u{ord(char):04x}" for char in secret)


def send(base_url: str, planted: Sequence[str], headers: dict[str, str] | None = None) -> int:
    """Send each secret in one request and in feedback about its answer. Return the number of
    answers with status 200. Check that an app reads an unredacted answer."""
    num_ok = 0
    with httpx.Client(base_url=base_url, timeout=60, headers=headers) as http:
        for number, secret in enumerate(planted):
            variants = list(_requests(secret))
            path, body = variants[number % len(variants)]
            text = json.dumps(body)
            is_escaped = number % 2 == 1 and '"prompt": [' not in text
            if is_escaped:
                text = text.replace(secret, escaped(secret))
            own = {"Content-Type": "application/json", "X-Session-Id": secret}
            reply = http.post(path, content=text, headers=own)
            num_ok += reply.status_code == 200
            if "say it is" in json.dumps(body) and "stream" not in body:
                assert secret in reply.text, (path, reply.text)
            if reply.status_code == 200 and "stream" not in body:
                feedback = {"id": reply.json()["id"], "comment": secret, "edited": f"no, {secret}"}
                http.post("/v1/feedback", json=feedback)
    return num_ok


def spellings(secret: str) -> list[bytes]:
    """Return the secret as bytes: its text, and the ids of its tokens in the fake engine, which are
    bytes."""
    text = secret.encode()
    return [
        text,
        b"".join(bytes([byte, 0, 0, 0]) for byte in text),
        json.dumps(list(text)).encode(),
    ]


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the bytes of each file below a folder, and each value of each SQLite file, also
    decompressed."""
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            yield str(file), file.read_bytes()
        if file.suffix == ".sqlite":
            yield from _values(file)


def _values(file: Path) -> Iterator[tuple[str, bytes]]:
    with contextlib.closing(sqlite3.connect(file)) as db:
        names = "select name from sqlite_master where type in ('table', 'view')"
        for (table,) in db.execute(names).fetchall():
            for row in db.execute(f'select * from "{table}"'):
                for value in row:
                    for raw in _forms(value):
                        yield f"{file}: {table}", raw


def _forms(value: object) -> Iterator[bytes]:
    if isinstance(value, str):
        yield value.encode()
    elif isinstance(value, bytes):
        yield value
        with contextlib.suppress(ValueError):
            yield decompress_numbers(value)
        with contextlib.suppress(ValueError):
            yield decompress_facts(value).encode()


def found(folder: Path, planted: Iterable[str]) -> list[tuple[str, str]]:
    """Return the places below a folder that have a secret, each with the secret. RE2 searches all
    spellings at once, which takes seconds for 10,000 secrets; a search for each takes half an hour.
    """
    secret_of = {spelling: secret for secret in planted for spelling in spellings(secret)}
    pattern = _pattern(list(secret_of))
    return [
        (place, secret_of[match.group()])
        for place, raw in contents(folder)
        for match in pattern.finditer(raw)
    ]


def _pattern(texts: Iterable[bytes]) -> Any:
    """Return a pattern that finds each of the texts."""
    re2: Any = importlib.import_module("re2")  # it has no type hints
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = MAX_PATTERN_BYTES
    return re2.compile(b"|".join(re2.escape(text) for text in texts), options)
