"""The rules of the game, as a state machine without I/O.

The game offers a turn with the turn's legal choices. The caller then plays the turn by naming one
of these players. All random numbers are derived from the seed: the same seed and the same moves
make the same game.

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
"""Choice of an accusation that names no player. Players are numbered from 1."""


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
"""Roles of the normal game. With three wolves, the wolves would win nine games of ten, because
there is no witch or hunter who helps the village."""
FIVE = (Role.WOLF,) + (Role.SEER,) + (Role.VILLAGER,) * 3
"""Roles of the small game, which has the same rules and only a third of the moves."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A player's turn and its legal choices.

    `Turn(4, Act.VOTE, (1, 2, 6))` means that player 4 votes for 1, 2 or 6.
    """

    player: int
    act: Act
    choices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """A move: the player that was named in a turn.

    `Move(1, 4, Act.ACCUSE, 6)` means that player 4 accused player 6 on day 1.
    """

    day: int
    player: int
    act: Act
    named: int


class Game:
    """One game: nights and days alternate until one side has won.

    The village wins when no wolf is left. The wolves win when the number of wolves is at least the
    number of all other players. Nobody is killed in the first night.
    """

    def __init__(self, seed: int, roles: tuple[Role, ...] = NINE) -> None:
        self._rng = random.Random(seed)
        shuffled = self._rng.sample(roles, len(roles))
        self.roles = dict(enumerate(shuffled, start=1))
        self.living = set(self.roles)
        self.day = 1
        self.moves: list[Move] = []
        self.gone: list[tuple[int, Act]] = []
        """Players who are dead, each with the act that removed the player, in order of time."""
        self._acts = [Act.CHECK]
        """Remaining acts of this round. The first one is being played."""
        self._waiting = self._movers(Act.CHECK)
        """Players who have not moved in the current act, in order."""

    @property
    def wolves(self) -> set[int]:
        """Player numbers of the living wolves."""
        return {player for player in self.living if self.roles[player] is Role.WOLF}

    @property
    def winner(self) -> Side | None:
        """Side that has won, or None."""
        if not self.wolves:
            return Side.VILLAGE
        return Side.WOLVES if 2 * len(self.wolves) >= len(self.living) else None

    @property
    def turn(self) -> Turn | None:
        """Current turn, or None if a side has won."""
        if self.winner is not None:
            return None
        player, act = self._waiting[0], self._acts[0]
        return Turn(player, act, self._choices(player, act))

    def play(self, named: int) -> None:
        """Make a move in the current turn. Raises ValueError for an illegal choice."""
        turn = self.turn
        if turn is None or named not in turn.choices:
            raise ValueError(f"{named} cannot be named: {turn or 'the game is over'}")
        self.moves.append(Move(self.day, turn.player, turn.act, named))
        self._waiting.pop(0)
        while not self._waiting and self.winner is None:
            self._next_act()

    def checked(self) -> dict[int, bool]:
        """Return for each player whom the seer has checked whether the player is a wolf.

        Only the seer may know the result.
        """
        players = (move.named for move in self.moves if move.act is Act.CHECK)
        return {player: self.roles[player] is Role.WOLF for player in players}

    def accusations(self, day: int | None = None) -> list[Move]:
        """Return the accusations of one day, or of all days. Every player knows them."""
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
        """Return the living players who take part in an act and have a legal choice."""
        role = {Act.KILL: Role.WOLF, Act.CHECK: Role.SEER}.get(act)
        movers = [player for player in sorted(self.living) if role in (None, self.roles[player])]
        return [player for player in movers if self._choices(player, act)]

    def _next_act(self) -> None:
        """Carry out the act that has ended, then begin the next act."""
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
        """Remove the player who was named most often in this act, if any player was named.

        Ties are broken at random.
        """
        named = [move.named for move in self.moves if (move.day, move.act) == (self.day, act)]
        player = self._rng.choice(most_named(named))
        if player != NOBODY:
            self.living.remove(player)
            self.gone.append((player, act))


def most_named(named: Iterable[int]) -> list[int]:
    """Return the players who were named most often, in ascending order.

    >>> most_named([3, 5, 5, 3, 1])
    [3, 5]
    """
    counts = Counter(named)
    most = max(counts.values(), default=0)
    return sorted(player for player, count in counts.items() if count == most)
