"""Simulate users: ask the questions of dataset.jsonl through the proxy, and rate each answer with a
thumb.

    python mock_user_request.py [--epochs 5] [--url http://127.0.0.1:8000/v1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import openai

DATASET = Path(__file__).resolve().parent / "dataset.jsonl"
NUM_USERS = 8
"""Users that ask at the same time."""
SEED = 0


async def ask_and_rate(client: openai.AsyncOpenAI, model: str, row: dict[str, Any]) -> bool:
    """Ask the question of a row, send a thumb for the answer, and return True for thumbs up."""
    reply = await client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": row["question"]}]
    )
    is_right = ends_with_number(reply.choices[0].message.content or "", row["answer"])
    feedback = {"id": reply.id, "thumbs": "up" if is_right else "down"}
    await client.post("/feedback", body=feedback, cast_to=object)
    return is_right


def ends_with_number(text: str, number: int) -> bool:
    match = re.search(r"(\d+)\.?$", text.strip())
    return match is not None and int(match[1]) == number


async def simulate(url: str, epochs: int) -> None:
    rows = [json.loads(line) for line in DATASET.read_text(encoding="utf-8").splitlines()] * epochs
    random.Random(SEED).shuffle(rows)
    slots = asyncio.Semaphore(NUM_USERS)
    async with openai.AsyncOpenAI(
        base_url=url, api_key=os.environ.get("FAKEVLLM_KEY", "any")
    ) as client:
        model = (await client.models.list()).data[0].id

        async def user(row: dict[str, Any]) -> bool:
            async with slots:
                return await ask_and_rate(client, model, row)

        thumbs = await asyncio.gather(*(user(row) for row in rows))
    print(f"{len(thumbs)} answers, {sum(thumbs) / len(thumbs):.0%} thumbs up")


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulate users who rate answers.")
    parser.add_argument("--epochs", type=int, default=5, help="passes through the dataset")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="URL of the proxy")
    options = parser.parse_args()
    try:
        asyncio.run(simulate(options.url, options.epochs))
    except openai.APIConnectionError:
        parser.exit(2, f"No proxy answers at {options.url}: start `fakevllm up`.\n")
    except openai.APIStatusError as error:
        parser.exit(1, f"The proxy refused a request: {error.message}\n")


if __name__ == "__main__":
    main()
