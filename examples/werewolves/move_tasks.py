"""Single moves as tasks, for training with one reward per move.

A task is a seed. The seed determines one turn of the trained side in which the prompt hints at a
player who may be named. Before this turn, the trained side moves at random, and the other players
are scripted. All these moves depend only on the seed, so all repeats of a task have the same
prompt.
"""

from __future__ import annotations

import random
from itertools import islice

from examples.werewolves.game import Act, Game, Role, Turn
from examples.werewolves.players import Scripted, assign_players, take_turn, trained_side
from examples.werewolves.prompts import suspects
from fakevllm import RandomReader, Task

NUM_SEEDS = 1_000_000
"""Number of seeds that are searched for tasks. About half of the seeds have a hinted turn."""


class RandomPlayer:
    """A player whose moves are random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def answer(self, prompt: str, turn: Turn) -> str:
        return str(self._rng.choice(turn.choices))


def game_at_hinted_turn(seed: int, roles: tuple[Role, ...]) -> Game | None:
    """Return the game of a seed at a random hinted turn of its trained side.

    Return None if the trained side has no such turn before the game ends.
    """
    game, rng = Game(seed, roles), random.Random(f"hinted turn {seed}")
    players = assign_players(game, trained_side(seed), RandomPlayer(rng), Scripted(seed))
    hinted: list[int] = []
    """For each hinted turn, the number of moves before the turn."""
    while (turn := game.turn) is not None:
        if isinstance(players[turn.player], RandomPlayer) and has_hint(game, turn):
            hinted.append(len(game.moves))
        take_turn(game, players, rng)
    if not hinted:
        return None
    replayed = Game(seed, roles)
    for move in game.moves[: rng.choice(hinted)]:
        replayed.play(move.named)
    return replayed


def has_hint(game: Game, turn: Turn) -> bool:
    """Return whether the prompt of a turn hints at a player who may be named.

    The prompt for a check by the seer has no hint, because the seer should check a player about
    whom nothing is known.
    """
    hinted = suspects(game, game.roles[turn.player])
    return turn.act is not Act.CHECK and any(player in turn.choices for player in hinted)


def move_tasks(num_tasks: int, seed: int, roles: tuple[Role, ...]) -> list[Task]:
    """Return tasks whose games have a hinted turn of the trained side."""
    tasks = RandomReader(NUM_SEEDS, seed)
    has_turn = (one for one in tasks if game_at_hinted_turn(one.metadata["seed"], roles))
    return list(islice(has_turn, num_tasks))
