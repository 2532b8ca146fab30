"""Train one model to play the wolves or the seer. All other players are static.

A task is a seed, which also decides whether the wolves or the seer are trained. With the rewards
`won` and `aim`, an episode is one game, and the repeats of a task play the same seed. With the
reward `move`, an episode is one move of such a game, and the repeats of a task get the same prompt.
The evaluations before and after the training are always whole games.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Literal, NamedTuple, TypeVar

from examples import exit_codes
from examples.run_log import wait_until_idle
from examples.werewolves import players
from examples.werewolves.game import FIVE, NINE, Game, Role
from examples.werewolves.move_tasks import game_at_hinted_turn, move_tasks
from fakevllm import RandomReader, SwarmClient, Task, TrainJob, run_episodes_until_all_complete

R = TypeVar("R")


class Result(NamedTuple):
    won: float
    aim: float


def play_game(
    client: SwarmClient, options: argparse.Namespace, kind: Literal["train", "eval"], task: Task
) -> Result:
    seed: int = task.metadata["seed"]
    side, game = players.trained_side(seed), Game(seed, roles(options))
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


def play_move(client: SwarmClient, options: argparse.Namespace, task: Task) -> float:
    seed: int = task.metadata["seed"]
    game = game_at_hinted_turn(seed, roles(options))
    assert game is not None, "move_tasks returns only seeds with such a turn"
    with client.episode(task) as episode:
        with episode.openai() as model:
            trained = players.Endpoint(model, constrained=not options.free)
            legal = players.take_turn(game, dict.fromkeys(game.roles, trained), random.Random(seed))
        # The random move that replaces an illegal answer earns nothing: it is the same for all
        # repeats, so it would reward every illegal answer to some prompts.
        hit = legal and players.hits_target(game, game.moves[-1])
        episode.end(float(hit), is_success=hit, log_metrics={"illegal": float(not legal)})
    return float(hit)


def main() -> None:
    options = parse_options()
    settings = vars(options).keys() & TrainJob.model_fields.keys()
    job = TrainJob(**{name: getattr(options, name) for name in settings})
    with SwarmClient(options.swarm_url, verbose=False) as client:

        def play(kind: Literal["train", "eval"], tasks: Iterable[Task]) -> str:
            results = run(tasks, lambda task: play_game(client, options, kind, task), options)
            return "won {:.3f}, aim {:.3f}".format(*map(fmean, zip(*results, strict=True)))

        def train(step: int) -> str:
            num_tasks, seed = options.batch_size, 1000 * options.seed + 100 + step
            if options.reward != "move":
                return play("train", repeated(RandomReader(num_tasks, seed), options))
            tasks = repeated(move_tasks(num_tasks, seed, roles(options)), options)
            hits = run(tasks, lambda task: play_move(client, options, task), options)
            return f"aim {fmean(hits):.3f}"

        client.auto_sync_train_config_and_start_engine(job)
        print("before:", play("eval", RandomReader(options.games, seed=1)), flush=True)
        for step in range(options.steps):
            print(f"step {step + 1}:", train(step), flush=True)
        wait_until_idle(client)  # the last step is still training
        print("after: ", play("eval", RandomReader(options.games, seed=1)))


def roles(options: argparse.Namespace) -> tuple[Role, ...]:
    return FIVE if options.small else NINE


def repeated(tasks: Iterable[Task], options: argparse.Namespace) -> list[Task]:
    return [task for task in tasks for _ in range(options.num_repeat)]


def run(tasks: Iterable[Task], play: Callable[[Task], R], options: argparse.Namespace) -> list[R]:
    return run_episodes_until_all_complete(list(tasks), play, options.parallel)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a model to play werewolves.")
    parser.add_argument("--swarm-url", default="http://127.0.0.1:10086")
    parser.add_argument("--small", action="store_true", help="five players instead of nine")
    parser.add_argument("--free", action="store_true", help="do not constrain answers to moves")
    parser.add_argument("--reward", choices=["move", "aim", "won"], default="move")
    parser.add_argument("--static", help="OpenAI base URL of static players; default: scripts")
    parser.add_argument("--key", default="any", help="API key for --static")
    parser.add_argument("--control", choices=["none", "frozen"], default="none")
    parser.add_argument("--lr", type=float, default=5e-4, help="use 1e-6 for a real model")
    numbers = {"steps": 30, "batch_size": 32, "num_repeat": 8, "ppo_epochs": 2}
    for name, default in (numbers | {"games": 200, "parallel": 16, "seed": 0}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    exit_codes.run(main)
