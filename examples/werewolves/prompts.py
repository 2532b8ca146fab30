"""The prompts of the players, and the parsing of their answers. This module does no I/O.

A prompt contains only what its player may know. Prompts are short, because the demo model's context
has 512 tokens. The most important information comes last, where a small model can use it.

    You are 2, a wolf. Wolves: 2 4. Accused today: 4 by 5. Kill: 1 3 5 6. Accused a wolf: 5.
    You are 6, the seer. No wolf: 1. Accused today: nobody. Accuse: 0 1 2 3 4 5. A wolf: 4.
    You are 3, a villager. Accused today: 4 by 6, 1 by 2. Vote: 1 2 4 5 6.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from examples.werewolves.game import Game, Role, Turn


def build_prompt(game: Game, turn: Turn) -> str:
    """Build the prompt for the player whose turn it is."""
    me = turn.player
    role = game.roles[me]
    sentences = [f"You are {me}, {'the' if role is Role.SEER else 'a'} {role}."]
    if role is Role.WOLF:
        sentences += [f"Wolves: {_listed(sorted(game.wolves))}."]
    if role is Role.SEER:
        sentences += [f"No wolf: {_listed(_checked(game, is_wolf=False))}."]
    accusations = [f"{move.named} by {move.player}" for move in game.accusations(game.day)]
    sentences += [f"Accused today: {', '.join(accusations) or 'nobody'}."]
    sentences += [f"{turn.act.capitalize()}: {_listed(turn.choices)}."]
    if role is Role.WOLF:
        sentences += [f"Accused a wolf: {_listed(suspects(game, role))}."]
    if role is Role.SEER:
        sentences += [f"A wolf: {_listed(suspects(game, role))}."]
    return " ".join(sentences)


def suspects(game: Game, role: Role) -> list[int]:
    """Return the living players at whom a role's prompt hints, the latest last.

    For the seer they are the wolves that it has found. For a wolf they are the players who have
    accused a wolf, because one of them may be the seer. A villager has no hint.
    """
    if role is Role.SEER:
        return _checked(game, is_wolf=True)
    return _accusers_of_wolves(game) if role is Role.WOLF else []


def parse_choice(answer: str, choices: Sequence[int]) -> int | None:
    """Return the first number in an answer that is a legal choice, or None.

    >>> parse_choice("Not 3, but 5.", (4, 5))
    5
    """
    numbers = (int(number) for number in re.findall(r"\d+", answer))
    return next((number for number in numbers if number in choices), None)


def _checked(game: Game, *, is_wolf: bool) -> list[int]:
    """Return the living players whom the seer has checked: only wolves, or only players who are no
    wolves."""
    results = game.checked().items()
    return [player for player, result in results if result is is_wolf and player in game.living]


def _accusers_of_wolves(game: Game) -> list[int]:
    """Return the living players who have accused a wolf, the latest last. One may be the seer."""
    wolves = {player for player, role in game.roles.items() if role is Role.WOLF}
    newest_first = reversed(game.accusations())
    accusers = dict.fromkeys(move.player for move in newest_first if move.named in wolves)
    return [player for player in reversed(accusers) if player in game.living - wolves]


def _listed(players: Iterable[int]) -> str:
    return " ".join(map(str, players)) or "nobody"
