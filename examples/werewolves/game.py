"""The rules, as a state machine: whose turn it is and what may be named, then what was named. No
I/O and no clock; lots are drawn from the seed: the same seed and the same moves make the same game.

    game = Game(seed=3)
    while game.turn is not None:
        game.play(choose(game.turn))
    print(game.winner)
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

NOBODY = 0
"""Players count from 1."""


class Role(StrEnum):
    WOLF = "wolf"
    SEER = "seer"
    VILLAGER = "villager"


class Side(StrEnum):
    WOLVES = "wolves"
    VILLAGE = "village"


class Act(StrEnum):
    KILL = "kill"
    CHECK = "check"
    ACCUSE = "accuse"
    VOTE = "vote"


NINE = (Role.WOLF,) * 2 + (Role.SEER,) + (Role.VILLAGER,) * 6
"""With three wolves, and neither witch nor hunter, they win nine games of ten."""
FIVE = (Role.WOLF,) + (Role.SEER,) + (Role.VILLAGER,) * 3
"""The small form: the same rules in a third of the moves."""


@dataclass(frozen=True, slots=True)
class Turn:
    """`Turn(4, Act.VOTE, (1, 2, 6))`: player 4 votes for 1, 2 or 6."""

    player: int
    act: Act
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """`Move(1, 4, Act.ACCUSE, 6)`: on day 1 player 4 accused 6."""

    day: int
    player: int
    act: Act
    named: int


class Game:
    """A night, then a day, until no wolf is left (the village wins), or no fewer wolves than others
    (the wolves win). In the first night nobody is killed."""

    def __init__(self, seed: int, roles: tuple[Role, ...] = NINE) -> None:
        self._lots = random.Random(seed)
        dealt = self._lots.sample(roles, len(roles))
        self.roles = dict(enumerate(dealt, start=1))
        self.living = set(self.roles)
        self.day = 1
        self.moves: list[Move] = []
        self.gone: list[tuple[int, Act]] = []
        """Who, and by which act, in this order."""
        self._acts = [Act.CHECK]
        """Of this round, that which runs first."""
        self._waiting = self._movers(Act.CHECK)

    @property
    def wolves(self) -> set[int]:
        """The living ones."""
        return {player for player in self.living if self.roles[player] is Role.WOLF}

    @property
    def winner(self) -> Side | None:
        if not self.wolves:
            return Side.VILLAGE
        return Side.WOLVES if 2 * len(self.wolves) >= len(self.living) else None

    @property
    def turn(self) -> Turn | None:
        """None once there is a winner."""
        if self.winner is not None:
            return None
        player, act = self._waiting[0], self._acts[0]
        return Turn(player, act, self._choices(player, act))

    def play(self, named: int) -> None:
        """Raises ValueError for what may not be named."""
        turn = self.turn
        if turn is None or named not in turn.choices:
            raise ValueError(f"{named} cannot be named: {turn or 'the game is over'}")
        self.moves.append(Move(self.day, turn.player, turn.act, named))
        self._waiting.pop(0)
        while not self._waiting and self.winner is None:
            self._next_act()

    def checked(self) -> dict[int, bool]:
        """Whom the seer has checked, and whether that is a wolf. Nobody else is to know."""
        seen = (move.named for move in self.moves if move.act is Act.CHECK)
        return {player: self.roles[player] is Role.WOLF for player in seen}

    def accusations(self, day: int | None = None) -> list[Move]:
        """Of one day, or all; everybody has heard them."""
        return [
            move
            for move in self.moves
            if move.act is Act.ACCUSE and move.named != NOBODY and day in (None, move.day)
        ]

    def _choices(self, player: int, act: Act) -> tuple[int, ...]:
        others = self.living - {player}
        if act is Act.KILL:
            others -= self.wolves
        if act is Act.CHECK:
            others -= self.checked().keys()
        if act is Act.ACCUSE:
            others |= {NOBODY}
        return tuple(sorted(others))

    def _movers(self, act: Act) -> list[int]:
        alone = {Act.KILL: Role.WOLF, Act.CHECK: Role.SEER}.get(act)
        movers = [one for one in sorted(self.living) if alone in (None, self.roles[one])]
        return [one for one in movers if self._choices(one, act)]

    def _next_act(self) -> None:
        ended = self._acts.pop(0)
        if ended in (Act.KILL, Act.VOTE):
            self._remove(ended)
        if not self._acts:
            self._acts = [Act.ACCUSE, Act.VOTE] if ended in (Act.KILL, Act.CHECK) else []
        if not self._acts:
            self.day += 1
            self._acts = [Act.CHECK, Act.KILL]
        self._waiting = self._movers(self._acts[0])

    def _remove(self, act: Act) -> None:
        """Who was named most in this round, if that is anybody; among equals by lot."""
        named = [move.named for move in self.moves if (move.day, move.act) == (self.day, act)]
        player = self._lots.choice(most_named(named))
        if player != NOBODY:
            self.living.remove(player)
            self.gone.append((player, act))


def most_named(named: Iterable[int]) -> list[int]:
    """
    >>> most_named([3, 5, 5, 3, 1])
    [3, 5]
    """
    counts = Counter(named)
    most = max(counts.values(), default=0)
    return sorted(player for player, count in counts.items() if count == most)
