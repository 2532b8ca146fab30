"""A planner and an executor, each a model of its own on a server of its own, learn together:

python -m examples.multi_model.run [--steps 40]
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from statistics import fmean

from openai import OpenAI

from examples import ending
from examples.run_log import settle, steps_of
from fakevllm import (
    SwarmClient,
    Task,
    TrainJob,
    episodes_together,
    run_episodes_until_all_complete,
    start_engines,
)

BATCH_SIZE, NUM_REPEAT, MAX_PARALLEL = 8, 8, 16
LAST = 5
"""Steps at each end of a curve that are compared."""


def planned(words: str) -> str | None:
    """The sum that the planner's words name.

    >>> planned("3 plus 4 is 9."), planned("The answer is 7.")
    ('3 plus 4', None)
    """
    found = re.match(r"\d+ plus \d+", words)
    return found and found.group()


def said(model: OpenAI, question: str) -> str:
    message = {"role": "user", "content": question}
    reply = model.chat.completions.create(model="any", messages=[message], max_tokens=24)  # pyright: ignore[reportArgumentType] - a plain dict is a message
    return reply.choices[0].message.content or ""


def play(clients: Sequence[SwarmClient], task: Task) -> tuple[float, float]:
    """The planner hears the task and should name the sum; the executor hears the plan alone. What
    each of them gets."""
    with episodes_together(clients, task) as (planner, executor):
        with planner.openai() as model:
            plan = planned(said(model, task.main_query))
        with executor.openai() as model:
            reply = said(model, f"What is {plan}?" if plan else "What is it?")
        is_planned = float(plan == task.metadata["plan"])
        is_right = float(re.findall(r"\d+", reply)[-1:] == [task.metadata["answer"]])
        planner.end(reward=is_planned)
        executor.end(reward=is_right)
    return is_planned, is_right


def sums(number: int, seed: int) -> list[Task]:
    chance = random.Random(seed)
    pairs = [(chance.randrange(8), chance.randrange(8)) for _ in range(number)]
    return [
        Task(
            task_id=f"{seed}-{place}",
            main_query=f"What is {left} plus {right}?",
            metadata={"plan": f"{left} plus {right}", "answer": str(left + right)},
        )
        for place, (left, right) in enumerate(pairs)
    ]


def curve(server_url: str) -> list[float]:
    """The mean reward of each step."""
    return [step.metrics["reward_mean"] for step in steps_of(server_url)]


def show(name: str, means: Sequence[float]) -> None:
    print(f"{name}: {' '.join(f'{mean:.2f}' for mean in means)}")
    if means:
        print(f"  first steps {fmean(means[:LAST]):.2f}, last steps {fmean(means[-LAST:]):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Two models of one agent learn.")
    parser.add_argument("--planner", default="http://127.0.0.1:10086")
    parser.add_argument("--executor", default="http://127.0.0.1:10087")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE)
    parser.add_argument("--num-repeat", type=int, default=NUM_REPEAT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", choices=["none", "frozen"], default="none")
    options = parser.parse_args()
    job = TrainJob(
        batch_size=options.batch_size,
        num_repeat=options.num_repeat,
        lr=4e-4,
        ppo_epochs=2,
        control=options.control,
    )
    clients = [SwarmClient(options.planner), SwarmClient(options.executor)]
    start_engines([(client, job) for client in clients])
    tasks = sums(options.steps * options.batch_size, options.seed)
    for step in range(options.steps):
        batch = tasks[step * options.batch_size : (step + 1) * options.batch_size]
        rewards = run_episodes_until_all_complete(
            [task for task in batch for _ in range(options.num_repeat)],
            lambda task: play(clients, task),
            MAX_PARALLEL,
        )
        means = "planner {:.2f}, executor {:.2f}".format(*map(fmean, zip(*rewards, strict=True)))
        print(f"step {step + 1} of {options.steps}: {means}", flush=True)
    for client in clients:
        settle(client)  # the last step
    show("planner ", curve(options.planner))
    show("executor", curve(options.executor))


if __name__ == "__main__":
    ending.run(main)
