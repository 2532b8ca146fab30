"""Who answers at the table. A player is anything with an OpenAI base URL and a key; the scripted
ones also answer in this process.

Roles of the trained side ask the episode's endpoint, all others ask the static one. What a player
says is read leniently: an answer that names nobody who may be named is a move by lot, and counted.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Protocol

from openai import OpenAI

from examples.werewolves import scripted
from examples.werewolves.game import Act, Game, Role, Side, Turn
from examples.werewolves.prompts import named_in, prompt

MAX_TOKENS = 16


class Player(Protocol):
    def answer(self, prompt: str, turn: Turn) -> str: ...


class Scripted:
    """In this process, and so without any cost."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def answer(self, prompt: str, turn: Turn) -> str:
        return scripted.answer(prompt, self._seed)


class Endpoint:
    """A model behind an OpenAI endpoint. With `held` its engine holds the answer to what may be
    named (`structured_outputs`, as vLLM and the embedded engine know it)."""

    def __init__(
        self, client: OpenAI, model: str = "any", *, held: bool = False, seed: int | None = None
    ) -> None:
        self._client, self._model, self._held, self._seed = client, model, held, seed

    def answer(self, prompt: str, turn: Turn) -> str:
        choice = {"choice": [str(one) for one in turn.choices]}
        reply = self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=MAX_TOKENS,
            seed=self._seed,
            extra_body={"structured_outputs": choice} if self._held else None,
        )
        return reply.choices[0].message.content or ""


@contextmanager
def static_for(base_url: str | None, api_key: str, seed: int) -> Generator[Player]:
    """Who plays the static roles of one game."""
    if base_url is None:
        yield Scripted(seed)
        return
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        yield Endpoint(client, seed=seed)


def side_of(seed: int) -> Side:
    """The side that is trained in this game: every second seed's wolves, else the seer."""
    return Side.WOLVES if seed % 2 else Side.VILLAGE


def seated(game: Game, side: Side, trained: Player, static: Player) -> dict[int, Player]:
    """By player: the wolves or the seer are the trained model, all others are not."""
    role = Role.WOLF if side is Side.WOLVES else Role.SEER
    return {player: trained if own is role else static for player, own in game.roles.items()}


def take_turn(game: Game, players: Mapping[int, Player], lots: random.Random) -> bool:
    """False for an answer that names nobody who may be named; then it is the lot's move."""
    turn = game.turn
    assert turn is not None, "the game is over"
    named = named_in(players[turn.player].answer(prompt(game, turn), turn), turn.choices)
    game.play(lots.choice(turn.choices) if named is None else named)
    return named is not None


def play_to_the_end(game: Game, players: Mapping[int, Player], seed: int) -> int:
    """How many answers were no move."""
    lots = random.Random(f"moves {seed}")  # others than the game's own, which deal the roles
    num_illegal = 0
    while game.turn is not None:
        num_illegal += not take_turn(game, players, lots)
    return num_illegal


def aim(game: Game, side: Side) -> float:
    """The share of the side's moves that named whom it must find: a wolf, or the seer. Nearer to
    the moves than the outcome; a check is a question and does not count."""
    own, sought = Role.SEER, Role.WOLF
    if side is Side.WOLVES:
        own, sought = Role.WOLF, Role.SEER
    moves = [one for one in game.moves if game.roles[one.player] is own and one.act != Act.CHECK]
    hits = sum(game.roles.get(one.named) is sought for one in moves)
    return hits / len(moves) if moves else 0.0
