"""The opponents by default: rules of thumb that read the very prompt a model gets, and answer with
a number. What they answer depends on prompt and seed alone.

    python -m examples.werewolves.scripted --port 9000

serves them as an OpenAI endpoint, to be named like any other (`--static`).
"""

from __future__ import annotations

import argparse
import random
import re
import time
from typing import Any

import uvicorn
from fastapi import FastAPI

from examples.werewolves.game import NOBODY, Act, most_named

SILENCE = 0.75
"""How often a villager, who knows nothing, accuses nobody. So who speaks up may be the seer: that
is the tell by which wolves find it."""


def answer(prompt: str, seed: int) -> str:
    lots = random.Random(f"{seed} {prompt}")
    act, choices = _asked(prompt)
    known = [one for one in _after("A wolf|Accused a wolf", prompt) if one in choices]
    accused = [one for one in _accused(prompt) if one in choices]
    if known and not (act is Act.ACCUSE and "a wolf" in prompt):
        return str(known[-1])
    if act is Act.VOTE and accused:
        return str(lots.choice(most_named(accused)))
    if act is Act.ACCUSE and ("seer" in prompt or lots.random() < SILENCE):
        return str(NOBODY)
    return str(lots.choice([one for one in choices if one not in _after("Wolves", prompt)]))


def _asked(prompt: str) -> tuple[Act, list[int]]:
    act = next(act for act in Act if f" {act.capitalize()}: " in prompt)
    return act, _after(act.capitalize(), prompt)


def _after(words: str, prompt: str) -> list[int]:
    found = re.search(rf"(?:{words}): ([\d ]+)\.", prompt)
    return [int(number) for number in found.group(1).split()] if found else []


def _accused(prompt: str) -> list[int]:
    wolves = _after("Wolves", prompt)
    accused = [int(number) for number in re.findall(r"(\d+) by", prompt)]
    return [one for one in accused if one not in wolves]


app = FastAPI(title="Scripted werewolves")


@app.post("/v1/chat/completions")
def complete(body: dict[str, Any]) -> dict[str, Any]:
    said = answer(body["messages"][-1]["content"], body.get("seed") or 0)
    message = {"role": "assistant", "content": said}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    head = {"id": "scripted", "object": "chat.completion", "created": int(time.time())}
    return head | {"model": body.get("model", "scripted"), "choices": [choice]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Scripted players as an OpenAI endpoint.")
    parser.add_argument("--port", type=int, default=9000)
    uvicorn.run(app, port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
