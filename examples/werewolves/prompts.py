"""What a player is told and how an answer is read. Pure; short, for the demo model's context ends
at 512 tokens, with what matters most at the end, where so small a model finds it. Only what the
player may know is in it.

    You are 2, a wolf. Wolves: 2 4. Accused today: 4 by 5. Kill: 1 3 5 6. Accused a wolf: 5.
    You are 6, the seer. No wolf: 1. Accused today: nobody. Accuse: 0 1 2 3 4 5. A wolf: 4.
    You are 3, a villager. Accused today: 4 by 6, 1 by 2. Vote: 1 2 4 5 6.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from examples.werewolves.game import Game, Role, Turn


def prompt(game: Game, turn: Turn) -> str:
    me = turn.player
    role = game.roles[me]
    told = [f"You are {me}, {'the' if role is Role.SEER else 'a'} {role}."]
    seen = {player: wolf for player, wolf in game.checked().items() if player in game.living}
    if role is Role.WOLF:
        told += [f"Wolves: {_listed(sorted(game.wolves))}."]
    if role is Role.SEER:
        told += [f"No wolf: {_listed(player for player, wolf in seen.items() if not wolf)}."]
    heard = [f"{move.named} by {move.player}" for move in game.accusations(game.day)]
    told += [f"Accused today: {', '.join(heard) or 'nobody'}."]
    told += [f"{turn.act.capitalize()}: {_listed(turn.choices)}."]
    if role is Role.WOLF:
        told += [f"Accused a wolf: {_listed(_accusers_of_wolves(game))}."]
    if role is Role.SEER:
        told += [f"A wolf: {_listed(player for player, wolf in seen.items() if wolf)}."]
    return " ".join(told)


def named_in(answer: str, choices: Sequence[int]) -> int | None:
    """The first number that may be named; None where there is none.

    >>> named_in("Not 3, but 5.", (4, 5))
    5
    """
    numbers = (int(number) for number in re.findall(r"\d+", answer))
    return next((number for number in numbers if number in choices), None)


def _accusers_of_wolves(game: Game) -> list[int]:
    """Living others, the newest last: of them the seer may be one."""
    wolves = {player for player, role in game.roles.items() if role is Role.WOLF}
    heard = reversed(game.accusations())
    accusers = dict.fromkeys(move.player for move in heard if move.named in wolves)
    return [one for one in reversed(accusers) if one in game.living - wolves]


def _listed(players: Iterable[int]) -> str:
    return " ".join(map(str, players)) or "nobody"
