"""The players of a game: models behind OpenAI endpoints, or scripts in this process.

The roles of the trained side call the episode's endpoint. All other players are static. An answer
without a legal choice becomes a random legal move, and is counted.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

from openai import OpenAI

from examples.werewolves import scripted
from examples.werewolves.game import Act, Game, Move, Role, Side, Turn
from examples.werewolves.prompts import build_prompt, parse_choice

MAX_TOKENS = 16


class Player(Protocol):
    """A player: anything that answers a prompt with text that should name one of the choices."""

    def answer(self, prompt: str, turn: Turn) -> str: ...


class Scripted:
    """A scripted player in this process."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def answer(self, prompt: str, turn: Turn) -> str:
        return scripted.answer(prompt, self._seed)


class Endpoint:
    """A model behind an OpenAI endpoint.

    If `constrained` is true, the engine samples only legal choices (`structured_outputs`, which
    vLLM and the embedded engine support).
    """

    def __init__(
        self,
        client: OpenAI,
        model: str = "any",
        *,
        constrained: bool = False,
        seed: int | None = None,
    ) -> None:
        self._client, self._model = client, model
        self._constrained, self._seed = constrained, seed

    def answer(self, prompt: str, turn: Turn) -> str:
        choice = {"choice": [str(player) for player in turn.choices]}
        reply = self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=MAX_TOKENS,
            seed=self._seed,
            extra_body={"structured_outputs": choice} if self._constrained else None,
        )
        return reply.choices[0].message.content or ""


@contextmanager
def static_player(base_url: str | None, api_key: str, seed: int) -> Generator[Player]:
    """Yield the player of all static roles in one game: the endpoint if there is one, else a
    script."""
    if base_url is None:
        yield Scripted(seed)
        return
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        yield Endpoint(client, seed=seed)


def trained_side(seed: int) -> Side:
    """Return the trained side: the wolves if the seed is odd, else the village with its seer."""
    return Side.WOLVES if seed % 2 else Side.VILLAGE


def trained_role(side: Side) -> Role:
    """Return the role of the side's trained players: all wolves, or the seer of the village."""
    return Role.WOLF if side is Side.WOLVES else Role.SEER


def assign_players(game: Game, side: Side, trained: Player, static: Player) -> dict[int, Player]:
    """Return the player for each number.

    The wolves or the seer, depending on `side`, are `trained`. All other players are `static`.
    """
    role = trained_role(side)
    return {player: trained if own is role else static for player, own in game.roles.items()}


def take_turn(game: Game, players: Mapping[int, Player], rng: random.Random) -> bool:
    """Let the current player move. Return True if the answer contained a legal choice.

    Without a legal choice the move is random.
    """
    turn = game.turn
    assert turn is not None, "the game is over"
    answer = players[turn.player].answer(build_prompt(game, turn), turn)
    named = parse_choice(answer, turn.choices)
    game.play(rng.choice(turn.choices) if named is None else named)
    return named is not None


def play_to_the_end(game: Game, players: Mapping[int, Player], seed: int) -> int:
    """Play a game and return the number of answers without a legal choice."""
    rng = random.Random(f"moves {seed}")  # independent of the numbers that assign the roles
    num_illegal = 0
    while game.turn is not None:
        num_illegal += not take_turn(game, players, rng)
    return num_illegal


def aim(game: Game, side: Side) -> float:
    """Return the share of the side's moves that named its target: a wolf, or the seer.

    A single move has more effect on this share than on the outcome of the game. The seer's checks
    do not count.
    """
    moves = [move for move in game.moves if game.roles[move.player] is trained_role(side)]
    moves = [move for move in moves if move.act is not Act.CHECK]
    hits = sum(hits_target(game, move) for move in moves)
    return hits / len(moves) if moves else 0.0


def hits_target(game: Game, move: Move) -> bool:
    """Return whether a move of a wolf named the seer, or a move of the village named a wolf."""
    is_wolf = game.roles[move.player] is Role.WOLF
    return game.roles.get(move.named) is (Role.SEER if is_wolf else Role.WOLF)
