"""Train a planner and an executor together, each with its own model on its own server.

python -m examples.multi_model.run [--steps 40]
"""

from __future__ import annotations

import argparse
import random
import re
from collections.abc import Sequence
from statistics import fmean

from openai import OpenAI

from examples import exit_codes
from examples.run_log import trained_steps, wait_until_idle
from fakevllm import (
    SwarmClient,
    Task,
    TrainJob,
    episodes_together,
    run_episodes_until_all_complete,
    start_engines,
)

BATCH_SIZE, NUM_REPEAT, MAX_PARALLEL = 8, 8, 16
NUM_COMPARED_STEPS = 5
"""The mean of this number of steps at the start of a curve is compared with the mean of as many
steps at its end."""


def parse_plan(reply: str) -> str | None:
    """Return the sum that the planner's reply begins with, or None.

    >>> parse_plan("3 plus 4 is 9."), parse_plan("The answer is 7.")
    ('3 plus 4', None)
    """
    match = re.match(r"\d+ plus \d+", reply)
    return match and match.group()


def ask(model: OpenAI, question: str) -> str:
    """Return the model's reply to one question."""
    message = {"role": "user", "content": question}
    reply = model.chat.completions.create(model="any", messages=[message], max_tokens=24)  # pyright: ignore[reportArgumentType] - a plain dict is a message
    return reply.choices[0].message.content or ""


def play(clients: Sequence[SwarmClient], task: Task) -> tuple[float, float]:
    """Play one episode and return the rewards of planner and executor.

    The planner gets the task and should name the sum in its reply, the plan. The executor gets only
    the plan.
    """
    with episodes_together(clients, task) as (planner, executor):
        with planner.openai() as model:
            plan = parse_plan(ask(model, task.main_query))
        with executor.openai() as model:
            reply = ask(model, f"What is {plan}?" if plan else "What is it?")
        is_planned = float(plan == task.metadata["plan"])
        is_right = float(re.findall(r"\d+", reply)[-1:] == [task.metadata["answer"]])
        planner.end(reward=is_planned)
        executor.end(reward=is_right)
    return is_planned, is_right


def create_tasks(number: int, seed: int) -> list[Task]:
    """Create tasks with random sums."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(8), rng.randrange(8)) for _ in range(number)]
    return [
        Task(
            task_id=f"{seed}-{index}",
            main_query=f"What is {left} plus {right}?",
            metadata={"plan": f"{left} plus {right}", "answer": str(left + right)},
        )
        for index, (left, right) in enumerate(pairs)
    ]


def learning_curve(server_url: str) -> list[float]:
    """Return the mean reward of each training step."""
    return [step.metrics["reward_mean"] for step in trained_steps(server_url)]


def print_curve(name: str, means: Sequence[float]) -> None:
    print(f"{name}: {' '.join(f'{mean:.2f}' for mean in means)}")
    if means:
        first, last = means[:NUM_COMPARED_STEPS], means[-NUM_COMPARED_STEPS:]
        print(f"  first steps {fmean(first):.2f}, last steps {fmean(last):.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the two models of one agent.")
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
    tasks = create_tasks(options.steps * options.batch_size, options.seed)
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
        wait_until_idle(client)  # the last step is still training
    print_curve("planner ", learning_curve(options.planner))
    print_curve("executor", learning_curve(options.executor))


if __name__ == "__main__":
    exit_codes.run(main)
