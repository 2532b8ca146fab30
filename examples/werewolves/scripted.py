"""Scripted players, the default opponents. They get the same prompts as a model.

An answer is a number and depends only on the prompt and the seed. This command serves the scripted
players as an OpenAI endpoint, whose URL can be passed to `--static`:

    python -m examples.werewolves.scripted --port 9000
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

SILENCE_PROBABILITY = 0.75
"""Probability that a villager, who knows nothing about the other players, accuses nobody. Because
of this, a player who accuses somebody is more likely to be the seer, and wolves can learn this."""


def answer(prompt: str, seed: int) -> str:
    """Return the number of the player to name, or NOBODY."""
    rng = random.Random(f"{seed} {prompt}")
    act, choices = _parse_turn(prompt)
    targets = [one for one in _numbers_after("A wolf|Accused a wolf", prompt) if one in choices]
    accused = [one for one in _accused(prompt) if one in choices]
    if targets and not (act is Act.ACCUSE and "a wolf" in prompt):
        return str(targets[-1])
    if act is Act.VOTE and accused:
        return str(rng.choice(most_named(accused)))
    if act is Act.ACCUSE and ("seer" in prompt or rng.random() < SILENCE_PROBABILITY):
        return str(NOBODY)
    wolves = _numbers_after("Wolves", prompt)
    return str(rng.choice([one for one in choices if one not in wolves]))


def _parse_turn(prompt: str) -> tuple[Act, list[int]]:
    """Return the act and the legal choices of a prompt."""
    act = next(act for act in Act if f" {act.capitalize()}: " in prompt)
    return act, _numbers_after(act.capitalize(), prompt)


def _numbers_after(label: str, prompt: str) -> list[int]:
    """Return the numbers after a label, as in `Wolves: 2 4.`. `label` is a regular expression."""
    match = re.search(rf"(?:{label}): ([\d ]+)\.", prompt)
    return [int(number) for number in match.group(1).split()] if match else []


def _accused(prompt: str) -> list[int]:
    """Return the players accused today, without the wolves that the prompt names."""
    wolves = _numbers_after("Wolves", prompt)
    accused = [int(number) for number in re.findall(r"(\d+) by", prompt)]
    return [one for one in accused if one not in wolves]


app = FastAPI(title="Scripted werewolves")


@app.post("/v1/chat/completions")
def chat_completion(body: dict[str, Any]) -> dict[str, Any]:
    """Answer the last message of a chat request."""
    text = answer(body["messages"][-1]["content"], body.get("seed") or 0)
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    fields = {"id": "scripted", "object": "chat.completion", "created": int(time.time())}
    return fields | {"model": body.get("model", "scripted"), "choices": [choice]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Serve the scripted players as an OpenAI endpoint."
    )
    parser.add_argument("--port", type=int, default=9000)
    uvicorn.run(app, port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
