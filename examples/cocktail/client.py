"""A client that plays one kind of task until the server has trained enough steps.

python -m examples.cocktail.client --mix math
"""

from __future__ import annotations

import argparse
import sys
import time
from statistics import fmean
from typing import Any

from examples import exit_codes
from examples.cocktail.tasks import BATCH_SIZE, MIXES, NUM_REPEAT, create_job, sums
from fakevllm import PeriodicDrainThreadPoolExecutor, SwarmClient, Task, ThrottlePolicy
from fakevllm_adapters.protocol.keys import new_id
from fakevllm_adapters.protocol.swarm import EngineStatus

POLL_INTERVAL_S = 0.2


def play(client: SwarmClient, name: str, task: Task) -> None:
    """Play one episode. The claim of the episode waits while this mix has more than its share of
    the batch."""
    mix = MIXES[name]
    policy = ThrottlePolicy(share=mix.share, mix=name)
    messages: list[Any] = [{"role": "system", "content": mix.system}]
    rewards: list[float] = []
    with client.episode(task, throttle_policy=policy) as episode, episode.openai() as model:
        for question, answer in sums(task.task_id, mix.num_turns):
            messages.append({"role": "user", "content": question})
            reply = model.chat.completions.create(model="any", messages=messages, max_tokens=24)
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            rewards.append(mix.score(text, answer))
            time.sleep(mix.pause_s)
        episode.end(reward=fmean(rewards))


def main() -> None:
    parser = argparse.ArgumentParser(description="Play one kind of task of the cocktail.")
    parser.add_argument("--mix", choices=MIXES, required=True)
    parser.add_argument("--server", default="http://127.0.0.1:10086")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--num-repeat", type=int, default=NUM_REPEAT)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    with SwarmClient(options.server) as client:  # leaving the block ends the running episodes
        train(client, options)


def train(client: SwarmClient, options: argparse.Namespace) -> None:
    """Play episodes until the steps are trained."""
    client.auto_sync_train_config_and_start_engine(create_job(options.num_repeat))
    executor = PeriodicDrainThreadPoolExecutor(max_parallel=options.concurrency)
    client_id = new_id()  # part of the task ids, so that a restarted client plays new tasks
    for number in range(options.steps * BATCH_SIZE):
        task = Task(task_id=f"{options.mix}-{client_id}-{number}")
        for _ in range(options.num_repeat):
            executor.submit(play, client, options.mix, task)
    while client.get_global_step() <= options.steps:
        # A server that does not answer may be restarted. A stopped engine stays stopped.
        if client.get_engine_status()[0] == EngineStatus.OFFLINE:
            sys.exit(f"{options.mix}: the engine was stopped before {options.steps} steps")
        time.sleep(POLL_INTERVAL_S)
    print(f"{options.mix}: {options.steps} steps are trained")


if __name__ == "__main__":
    exit_codes.run(main)
