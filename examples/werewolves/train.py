"""Wolves and seer share the model that is trained; all others are static.

One episode is one game, its task is a seed, and the seed also draws the side: the wolves, who all
call the episode's endpoint, or the seer. So a game has one reward, and siblings play the same seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import fmean
from typing import Literal, NamedTuple

from examples import ending
from examples.werewolves.game import FIVE, NINE, Game
from examples.werewolves.players import Endpoint, aim, play_to_the_end, seated, side_of, static_for
from fakevllm import RandomReader, SwarmClient, Task, TrainJob, run_episodes_until_all_complete


class Result(NamedTuple):
    won: float
    aim: float


def played(
    client: SwarmClient, options: argparse.Namespace, kind: Literal["train", "eval"], task: Task
) -> Result:
    seed: int = task.metadata["seed"]
    side, game = side_of(seed), Game(seed, FIVE if options.small else NINE)
    with client.episode(task, episode_type=kind) as episode:
        with episode.openai() as model, static_for(options.static, options.key, seed) as static:
            trained = Endpoint(model, held=not options.free)
            illegal = play_to_the_end(game, seated(game, side, trained, static), seed)
        result = Result(float(game.winner is side), aim(game, side))
        reward = result.won if options.reward == "won" else result.aim
        metrics = {**result._asdict(), "illegal": float(illegal)}
        episode.end(reward=reward, is_success=result.won > 0, log_metrics=metrics)
    return result


def main() -> None:
    options = asked()
    settings = vars(options).keys() & TrainJob.model_fields.keys()
    job = TrainJob(**{name: getattr(options, name) for name in settings})
    with SwarmClient(options.swarm_url, verbose=False) as client:

        def play(kind: Literal["train", "eval"], tasks: Iterable[Task]) -> str:
            results = run_episodes_until_all_complete(
                list(tasks), lambda task: played(client, options, kind, task), options.parallel
            )
            return "won {:.2f}, aim {:.2f}".format(*map(fmean, zip(*results, strict=True)))

        client.auto_sync_train_config_and_start_engine(job)
        print("before:", play("eval", RandomReader(options.games, seed=1)), flush=True)
        for step in range(options.steps):
            batch = RandomReader(options.batch_size, seed=100 + step)
            games = [task for task in batch for _ in range(options.num_repeat)]
            print(f"step {step + 1}:", play("train", games), flush=True)
        print("after: ", play("eval", RandomReader(options.games, seed=1)))


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Werewolves, trained by playing.")
    parser.add_argument("--swarm-url", default="http://127.0.0.1:10086")
    parser.add_argument("--small", action="store_true", help="five players instead of nine")
    parser.add_argument("--free", action="store_true", help="answers are not held to the moves")
    parser.add_argument("--reward", choices=["won", "aim"], default="won")
    parser.add_argument("--static", help="the others' OpenAI base URL; else they are scripted")
    parser.add_argument("--key", default="any", help="of --static")
    parser.add_argument("--control", choices=["none", "frozen"], default="none")
    parser.add_argument("--lr", type=float, default=4e-4, help="a real model's: 1e-6")
    numbers = {"steps": 30, "batch_size": 8, "num_repeat": 8, "ppo_epochs": 2}
    for name, default in (numbers | {"games": 200, "parallel": 16}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    ending.run(main)
