"""Train one model to play the wolves or the seer. All other players are static.

An episode is one game. Its task is a seed, which also decides whether the wolves or the seer are
trained. A game has one reward, and the repeats of a task play the same seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import fmean
from typing import Literal, NamedTuple

from examples import exit_codes
from examples.werewolves import players
from examples.werewolves.game import FIVE, NINE, Game
from fakevllm import RandomReader, SwarmClient, Task, TrainJob, run_episodes_until_all_complete


class Result(NamedTuple):
    won: float
    aim: float


def play_episode(
    client: SwarmClient, options: argparse.Namespace, kind: Literal["train", "eval"], task: Task
) -> Result:
    seed: int = task.metadata["seed"]
    side, game = players.trained_side(seed), Game(seed, FIVE if options.small else NINE)
    with client.episode(task, episode_type=kind) as episode:
        static_player = players.static_player(options.static, options.key, seed)
        with episode.openai() as model, static_player as static:
            trained = players.Endpoint(model, constrained=not options.free)
            seats = players.assign_players(game, side, trained, static)
            illegal = players.play_to_the_end(game, seats, seed)
        result = Result(float(game.winner is side), players.aim(game, side))
        reward = result.won if options.reward == "won" else result.aim
        metrics = {**result._asdict(), "illegal": float(illegal)}
        episode.end(reward=reward, is_success=result.won > 0, log_metrics=metrics)
    return result


def main() -> None:
    options = parse_options()
    settings = vars(options).keys() & TrainJob.model_fields.keys()
    job = TrainJob(**{name: getattr(options, name) for name in settings})
    with SwarmClient(options.swarm_url, verbose=False) as client:

        def play(kind: Literal["train", "eval"], tasks: Iterable[Task]) -> str:
            results = run_episodes_until_all_complete(
                list(tasks),
                lambda task: play_episode(client, options, kind, task),
                options.parallel,
            )
            return "won {:.2f}, aim {:.2f}".format(*map(fmean, zip(*results, strict=True)))

        client.auto_sync_train_config_and_start_engine(job)
        print("before:", play("eval", RandomReader(options.games, seed=1)), flush=True)
        for step in range(options.steps):
            batch = RandomReader(options.batch_size, seed=100 + step)
            games = [task for task in batch for _ in range(options.num_repeat)]
            print(f"step {step + 1}:", play("train", games), flush=True)
        print("after: ", play("eval", RandomReader(options.games, seed=1)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model to play werewolves.")
    parser.add_argument("--swarm-url", default="http://127.0.0.1:10086")
    parser.add_argument("--small", action="store_true", help="five players instead of nine")
    parser.add_argument("--free", action="store_true", help="do not constrain answers to moves")
    parser.add_argument("--reward", choices=["won", "aim"], default="won")
    parser.add_argument("--static", help="OpenAI base URL of static players; default: scripts")
    parser.add_argument("--key", default="any", help="API key for --static")
    parser.add_argument("--control", choices=["none", "frozen"], default="none")
    parser.add_argument("--lr", type=float, default=4e-4, help="use 1e-6 for a real model")
    numbers = {"steps": 30, "batch_size": 8, "num_repeat": 8, "ppo_epochs": 2}
    for name, default in (numbers | {"games": 200, "parallel": 16}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    exit_codes.run(main)
